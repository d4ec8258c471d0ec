"""Paths and other odd values on the command line."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlm.config.compose import compose
from vlm.config.override import quote

odd = st.text(
    alphabet=st.one_of(
        st.sampled_from(" =,()[]{}'\"#$\\:;~!@%^&*|<>?`\t\n-+.é漢😀a0_"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    ),
    min_size=1,
    max_size=8,
)


class TestPaths:
    @pytest.mark.slow
    @settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.tuples(odd, odd), min_size=20, max_size=20))
    def test_any_path_is_a_value_as_it_stands(self, names):
        paths = [f"/{first}/{second}" for first, second in names]
        paths = [path for path in paths if not re.search(r"\$\{.*\}", path, re.DOTALL)]
        got = compose([f"+some.key{index}={path}" for index, path in enumerate(paths)])
        assert list(got.get("some", {}).values()) == paths

    def test_what_exists_is_a_path(self, collect):
        names = [
            "a,b",
            "[1,2]",
            "{a: b}",
            "a b ",
            "x=y",
            "(z)",
            "${seed}",
            "\\${",
            "it's",
            "'q'",
            "#1",
            "é,漢",
            "choice(a)",
        ]
        for name in names:
            Path(name).mkdir()
        status, seen = collect(*(f"+some.key{index}={name}" for index, name in enumerate(names)))
        assert status == 0
        assert list(seen[0]["some"].values()) == names

    @pytest.mark.slow
    def test_what_exists_is_no_sweep(self, collect):
        Path("a,b").mkdir()
        seen = collect("-m", "data.root=a,b", "seed=1,2")[1]
        assert [given["data"]["root"] for given in seen] == ["a,b", "a,b"]

    def test_numbers_stay_numbers_whatever_exists(self):
        Path("1").mkdir()
        Path("null").mkdir()
        Path("shapes").mkdir()
        got = compose(["seed=1", "data=shapes", "data.num_workers=1"])
        assert (got["seed"], got["data"]["num_workers"]) == (1, 1)

    def test_a_key_for_a_path_takes_any_name(self):
        names = ["2024", "true", "1e3", "a,b", "a b", "[1]x"]
        got = compose([f"+some.key{index}.root={name}" for index, name in enumerate(names)])
        assert [value["root"] for value in got["some"].values()] == names

    def test_interpolations_work_in_paths(self):
        got = compose(["data.root=/runs/${name}/a,b", "model.encoder.depth=${model.dim}"])
        assert got["data"]["root"] == "/runs/captioning/a,b"
        assert got["model"]["encoder"]["depth"] == 8

    def test_hydras_own_quotes_and_types_work(self, collect):
        got = collect("data.root='/a b'", "optim.betas=[0.5,0.6]", "task={smoothing: 0.5}", "data.num_workers=null")[1][
            0
        ]
        assert got["data"]["root"] == "/a b"
        assert got["optim"]["betas"] == [0.5, 0.6]
        assert got["task"] == {"smoothing": 0.5}
        assert got["data"]["num_workers"] is None

    @pytest.mark.slow
    def test_paths_can_be_swept_over(self, collect):
        assert [c["data"]["root"] for c in collect("-m", "data.root=/a b,/c")[1]] == ["/a b", "/c"]


def test_a_value_of_spaces_is_kept() -> None:
    """As the delimiter ' ', which a shell delivers without its quotes."""
    assert quote("data.source.delimiter= ") == "data.source.delimiter=' '"
