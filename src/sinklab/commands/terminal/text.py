"""Text that comes from models and files, for a terminal."""


def printable(text: str) -> str:
    """The text with control characters shown as `�`, so that a name cannot steer the terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)
