"""Command line options made from settings models."""

from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field, field_validator
from typer.testing import CliRunner

from sinklab.commands.options import Only, PanelCommand, with_options
from sinklab.errors import InputError
from sinklab.settings import INPUT, CommandSettings, Flag, Several


class Inner(CommandSettings, frozen=True):
    kind: Literal["one", "two"] = Field(default="one", description="One of two.")
    loss: bool = Field(default=True, description="Leave it out.")


class Outer(CommandSettings, frozen=True):
    inner: Inner = Inner()
    count: int = Field(default=3, ge=1, le=9, description="How many.")
    sizes: Annotated[Several[Annotated[int, Field(ge=2)]], Flag("--size", metavar="N", panel=INPUT)] = Field(
        default=(), description="May be repeated."
    )
    pair: tuple[int, int] | None = Field(default=None, description="Two of them.")
    share: float | None = Field(default=None, description="None: whatever fits.")
    hidden: int = 7

    @field_validator("share")
    @classmethod
    def _is_a_share(cls, share: float | None) -> float | None:
        if share is not None and share > 1:
            raise InputError(f"--share {share}: give a share")
        return share


def called(*arguments: object, default: Outer | None = None, only: Only | None = None) -> Outer:
    found: list[Outer] = []

    def command(*, name: str = "x", settings: Annotated[Outer, only] = default) -> None:  # type: ignore[assignment]
        found.append(settings)

    app = typer.Typer()
    app.command()(with_options(command))
    app([str(one) for one in arguments], standalone_mode=False)
    return found[0]


def shown() -> str:
    app = typer.Typer()

    @app.command(cls=PanelCommand)
    @with_options
    def command(settings: Outer) -> None: ...

    return CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output


def test_without_options_the_settings_have_their_defaults() -> None:
    assert called() == Outer()


def test_every_field_is_an_option() -> None:
    options = ("--kind", "two", "--no-loss", "--count", 4, "--size", 2, "--size", 3, "--pair", 5, 6, "--share", 0.5)
    assert called(*options) == Outer(inner=Inner(kind="two", loss=False), count=4, sizes=(2, 3), pair=(5, 6), share=0.5)


def test_a_repeatable_whole_number_takes_comma_separated_lists() -> None:
    assert called("--size", "2,3", "--size", 5) == Outer(sizes=(2, 3, 5))
    with pytest.raises(InputError, match=r"^--size 2,3\.5,x: expected whole numbers, such as 2 or 2,3$"):
        called("--size", "2,3.5", "--size", "x")
    with pytest.raises(InputError, match=r"^--size 1: Input should be greater than or equal to 2$"):
        called("--size", "2,1")


def test_help_choices_defaults_and_panels_are_those_of_the_fields() -> None:
    lines = {line.split()[1]: line for line in shown().splitlines() if "--" in line}
    assert "x<=" not in shown()
    assert lines["--count"].split()[2] == "N"
    assert "How many. [default: 3]" in lines["--count"]
    assert "<one|two>" in lines["--kind"]
    assert "N" in lines["--size"].split()
    assert {"--no-loss", "--pair", "--share"} < lines.keys()
    assert "--hidden" not in lines
    panels = [line.split()[1] for line in shown().splitlines() if line.startswith("╭")]
    assert panels[-2:] == ["Input", "Advanced"]
    assert shown().index("Input") < shown().index("--size") < shown().index("Advanced") < shown().index("--count")


def test_bounds_are_checked_though_they_are_not_shown() -> None:
    with pytest.raises(InputError, match=r"^--count 10: Input should be less than or equal to 9$"):
        called("--count", 10)

    def command(*, seeds: Annotated[int, typer.Option(min=1)] = 1) -> None: ...

    app = typer.Typer()
    app.command(cls=PanelCommand)(with_options(command))
    with pytest.raises(typer.BadParameter, match="Input should be greater than or equal to 1") as refused:
        app(["--seeds", "0"], standalone_mode=False)
    assert refused.value.format_message().startswith("Invalid value for '--seeds'")
    assert "x>=" not in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output


def test_a_command_may_have_some_of_the_fields_and_defaults_of_its_own() -> None:
    default = Outer(count=5, hidden=8, inner=Inner(kind="two"))
    assert called("--no-loss", default=default, only=Only("loss", "count")) == default.model_copy(
        update={"inner": Inner(kind="two", loss=False)}
    )
    with pytest.raises(Exception, match="No such option: --share"):
        called("--share", 1, only=Only("count"))


def test_an_error_of_a_validator_keeps_its_sentence() -> None:
    with pytest.raises(InputError, match=r"^--share 2.0: give a share$"):
        called("--share", 2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": 0}, "--count 0: Input should be greater than or equal to 1"),
        ({"sizes": [2, 1]}, "--size 1: "),
        ({"count": "4"}, "--count '4': Input should be a valid integer"),
        ({"cuont": 4}, "cuont 4: Extra inputs are not permitted"),
    ],
)
def test_an_invalid_value_is_reported_with_its_option(values: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=f"^{said}"):
        Outer(**values)  # type: ignore[arg-type]


def test_a_missing_value_is_named_without_the_others() -> None:
    class Needs(CommandSettings, frozen=True):
        batch_size: int
        count: int = 3

    with pytest.raises(InputError, match=r"^--batch-size: Field required$"):
        Needs(count=4)  # type: ignore[call-arg]


def test_settings_are_unchanged_after_a_dump_and_a_validation() -> None:
    settings = Outer(sizes=(4, 5), pair=(1, 2))
    assert Outer.model_validate(settings.model_dump()) == settings
