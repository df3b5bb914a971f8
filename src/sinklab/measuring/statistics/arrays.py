"""Arrays of a result: each is declared once, as a field with its axes, and stands in measurement.npz under its name."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

import numpy as np
from pydantic import ConfigDict, Field

from sinklab.schema import Part

Array = Annotated[np.ndarray, Field(exclude=True, repr=False)]
ArrayOrNone = Annotated[np.ndarray | None, Field(exclude=True, repr=False)]


class Axes:
    """What the axes of an array are, a letter for each: `Annotated[Array, Axes("LHT")]`.

    Attributes:
        infinite: whether its numbers may be infinite; NaN they never are.
    """

    axes: str
    infinite: ClassVar[bool] = False

    def __init__(self, axes: str) -> None:
        self.axes = axes


class WithArrays(Part):
    """A part of measurement.json, whose document leaves its arrays to measurement.npz.

    Attributes:
        prefix: of the names there.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    prefix: ClassVar[str] = ""

    @classmethod
    def declared(cls) -> Iterator[tuple[str, Axes]]:
        """The name of every array and what declares its axes."""
        for name, field in cls.model_fields.items():
            yield from ((name, one) for one in field.metadata if isinstance(one, Axes))

    @classmethod
    def found_in(cls, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Its fields among the arrays of a file."""
        return {name: arrays[cls.prefix + name] for name, _ in cls.declared() if cls.prefix + name in arrays}

    def arrays(self) -> dict[str, np.ndarray]:
        """What measurement.npz holds of this, under its names there."""
        found = {self.prefix + name: getattr(self, name) for name, _ in self.declared()}
        return {name: array for name, array in found.items() if array is not None}

    def check_arrays(self, **sizes: int) -> None:
        """Refuse arrays that do not go together.

        Args:
            sizes: of axes, by letter; those of the others are what the first array has.

        Raises:
            ValueError: an array of another shape, with NaN, or with infinity where it is not declared.
        """
        arrays = self.arrays()
        for name, one in self.declared():
            if (array := arrays.get(self.prefix + name)) is None:
                continue
            if array.ndim == len(one.axes):
                sizes = dict(zip(one.axes, array.shape, strict=True)) | sizes
            expected = tuple(sizes.get(axis, "any") for axis in one.axes)
            if array.shape != expected:
                raise ValueError(f"{self.prefix}{name} has shape {array.shape}, expected {expected}")
            if np.isnan(array).any() or not (one.infinite or np.isfinite(array).all()):
                raise ValueError(f"{self.prefix}{name} contains NaN or infinity")
