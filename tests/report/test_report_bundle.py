"""The charts' code is bundled once, and a cache that is damaged or cannot be written costs time only."""

import pytest

from sinklab.errors import InputError
from sinklab.files import cache_folder
from sinklab.report import page


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The scripts that were bundled, with a cache folder of the test's own."""
    calls = []

    def bundled(snippet):
        calls.append(snippet)
        return f"/* Vega */ {snippet}"

    monkeypatch.setenv("SINKLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(page.vlc, "javascript_bundle", bundled)
    return calls


def bundled_anew():
    """Vega bundle without the cache of this process."""
    return page.vega_bundle.__wrapped__()


def test_the_chart_code_is_bundled_once_for_all_processes(made):
    assert bundled_anew() == bundled_anew() == f"/* Vega */ {page.SNIPPET}"
    assert made == [page.SNIPPET]


def test_another_version_is_bundled_again(made, monkeypatch):
    bundled_anew()
    monkeypatch.setattr(page, "version", lambda _: "99")
    bundled_anew()
    assert len(made) == 2


def test_a_cached_bundle_that_is_empty_or_not_text_is_made_again(made, tmp_path):
    whole = bundled_anew()
    (kept,) = (tmp_path / "cache").rglob("*.js")
    for damaged in (b"", b"\xff\xfe\x00"):
        kept.write_bytes(damaged)
        assert bundled_anew() == whole
        assert kept.read_text() == whole


def test_the_bundle_is_made_without_a_cache_that_cannot_be_written(made, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert bundled_anew() == bundled_anew()
    assert len(made) == 2


def test_the_bundle_is_made_without_a_home_directory(made, monkeypatch):
    monkeypatch.setenv("SINKLAB_CACHE", "~nobody-of-this-name/cache")
    assert bundled_anew() == bundled_anew()
    assert len(made) == 2
    with pytest.raises(InputError, match="SINKLAB_CACHE"):
        cache_folder()
