"""What goes with a sink, beyond the sink metric: angles, entropy, distances, secondary sinks, kurtosis, maps.

All of it is asked for (`--details`), because it costs more than the sink metric. Everything is first a mean over the
real queries of a sequence, then a mean over the sequences. A statistic is declared in a file of this folder
(declared.py) and registered here, by the field that holds its array.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

import numpy as np
from pydantic import ConfigDict, FiniteFloat, SerializerFunctionWrapHandler, model_serializer, model_validator

from sinklab.measuring.statistics.angles import Cosine, NormProduct
from sinklab.measuring.statistics.arrays import Array, ArrayOrNone, WithArrays
from sinklab.measuring.statistics.buckets import ByDistance, FirstByQuery, RestByQuery
from sinklab.measuring.statistics.compression import MatrixEntropy
from sinklab.measuring.statistics.declared import Statistic
from sinklab.measuring.statistics.entropy import Entropy
from sinklab.measuring.statistics.maps import AttentionMap, CosineMap, NormProductMap
from sinklab.measuring.statistics.secondary import Percent, Secondary, SecondarySink, SecondaryToken
from sinklab.measuring.statistics.stream import Alignment, Kurtosis
from sinklab.measuring.statistics.values import ValueRatio


class Details(WithArrays):
    """The statistics of a measurement, each by the name of its array, in the order of the files.

    What a model or older files do not have is None. Beside the fields below there are those that the statistics
    declare, such as `entropy_by_layer` (declared.py): lists of a number for each layer or block, in `by_layer`.

    Attributes:
        secondary_rate: percent of (sequence, layer, head) triples with a secondary sink at a position of 5 .. T / 2.
        secondary_sinks: the strongest from position 2 on (secondary.py), strongest first.
        secondary_tokens: which tokens are such sinks most often; None in older files.
        distances: first distance of each bucket: 0, 1, 2, 4, ..
        queries: first query of each bucket, 1-based: 1, 2, 4, ..
        maps: (layer, head) of every map, 1-based.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, list[FiniteFloat] | None]  # pyright: ignore[reportIncompatibleVariableOverride]
    prefix = "details_"

    secondary_rate: Percent
    secondary_sinks: list[SecondarySink]
    secondary_tokens: list[SecondaryToken] | None = None
    distances: list[int]
    queries: list[int]
    maps: list[tuple[int, int]]
    entropy: Annotated[Array, Entropy()]
    cosine: Annotated[ArrayOrNone, Cosine()] = None
    norm_product: Annotated[ArrayOrNone, NormProduct()] = None
    by_distance: Annotated[Array, ByDistance()]
    first_by_query: Annotated[Array, FirstByQuery()]
    rest_by_query: Annotated[Array, RestByQuery()]
    value_ratio: Annotated[ArrayOrNone, ValueRatio()] = None
    secondary: Annotated[Array, Secondary()]
    kurtosis: Annotated[ArrayOrNone, Kurtosis()] = None
    alignment: Annotated[ArrayOrNone, Alignment()] = None
    matrix_entropy: Annotated[ArrayOrNone, MatrixEntropy()] = None
    map_attention: Annotated[ArrayOrNone, AttentionMap()] = None
    map_cosine: Annotated[ArrayOrNone, CosineMap()] = None
    map_norm_product: Annotated[ArrayOrNone, NormProductMap()] = None

    @property
    def by_layer(self) -> Mapping[str, list[float] | None]:
        """The fields that statistics declare, by name."""
        return self.__pydantic_extra__

    @model_validator(mode="after")
    def _agrees_with_the_declarations(self) -> Self:
        unknown = set(self.by_layer) - {field for one in STATISTICS.values() for field in one.fields}
        if unknown:
            raise ValueError(f"unknown fields: {', '.join(sorted(unknown))}")
        self.check_arrays(D=len(self.distances), Q=len(self.queries), P=len(self.maps))
        for statistic, array in self.present():
            numbers = [self.by_layer.get(field) for field in statistic.fields]
            if numbers and numbers[0] is None:
                raise ValueError(f"{statistic.fields[0]} is missing")
            for field, values in zip(statistic.fields, numbers, strict=True):
                if values is not None and len(values) != len(array):
                    raise ValueError(f"{field} has {len(values)} values, expected {len(array)}")
        return self

    @model_serializer(mode="wrap")
    def _layers_first(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document = handler(self)
        return {name: document[name] for name in (*self.by_layer, *document)}

    def present(self) -> Iterator[tuple[Statistic, np.ndarray]]:
        """Declaration and array of every statistic that there is."""
        for name, statistic in STATISTICS.items():
            array: np.ndarray | None = getattr(self, name)
            if array is not None:
                yield statistic, array


STATISTICS = {name: declared for name, declared in Details.declared() if isinstance(declared, Statistic)}
"""Every statistic by its name."""
