"""Interventions: the catalogue of all keys, named overlays, and neutral values."""

from sinklab.interventions.catalogue import Intervention, catalogue
from sinklab.interventions.variants import NEUTRAL, VARIANTS, Neutral, Variant

__all__ = ["NEUTRAL", "VARIANTS", "Intervention", "Neutral", "Variant", "catalogue"]
