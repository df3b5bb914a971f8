"""The data part of a recipe: its values and its errors."""

import pytest
from pydantic import ValidationError

from sinklab.data.loader import DataConfig, FixedToken, RandomTokens


def test_the_default_data_config_is_that_of_the_lab():
    config = DataConfig()
    assert (config.source, config.tokenizer, config.bos) == ("stdlib", "train:1024", False)


def test_a_config_is_read_back_unchanged():
    config = DataConfig(fixed_token=FixedToken(positions=[0, 2]), random_tokens=RandomTokens(start=3, end=5))
    assert DataConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"valid_fraction": 0}, ["valid_fraction", "greater than 0"]),
        ({"valid_fraction": 0.9}, ["valid_fraction", "less than or equal to 0.5"]),
        ({"text_limit_bytes": 0}, ["text_limit_bytes", "greater than or equal to 1"]),
        ({"token_budget": 0}, ["token_budget", "greater than or equal to 1"]),
        ({"tokenizer": "train:100"}, ["tokenizer", "at least 258"]),
        ({"tokenizer": "train:many"}, ["tokenizer", "whole number"]),
        ({"fixed_token": {"positions": []}}, ["fixed_token.positions", "at least 1 item"]),
        ({"fixed_token": {"positions": [-1]}}, ["fixed_token.positions", "0-based"]),
        ({"fixed_token": {"positions": [1, 1]}}, ["fixed_token.positions", "distinct"]),
        ({"random_tokens": {"start": 4, "end": 4}}, ["random_tokens", "end must be greater than start"]),
        ({"fixed_token": {"positions": [2]}, "random_tokens": {"start": 1, "end": 3}}, ["both replace position 2"]),
        ({"bos": True, "fixed_token": {"positions": [0]}}, ["bos", "at position 1"]),
        ({"bos": True, "random_tokens": {"start": 0, "end": 1}}, ["bos", "at position 1"]),
        ({"token_bugdet": 5}, ["token_bugdet", "not permitted"]),
    ],
)
def test_an_impossible_value_is_refused_with_the_field_and_what_is_allowed(values: dict, told: list[str]):
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(values)
    for words in told:
        assert words in str(caught.value)
