"""Files of a user's own divide the inside of a stage: they train as one process, at the cost that they tell."""

import ast
import re
import runpy

import pytest
import torch
from processes import ROOT, python
from test_members import job

EXAMPLES = ROOT / "docs" / "examples"


def shown(printed):
    """Return the numbers of each line by the way that it begins with."""
    return {way: list(map(float, re.findall(r"\d+(?:\.\d+)?", rest))) for way, rest in re.findall("(.*):(.*)", printed)}


def one(folder, name, *options):
    return shown(python(EXAMPLES / name, *options, cwd=folder).stdout)


def by_members(folder, members, name, *options, run=()):
    """Run an example as all members of one worker; return what the first one shows."""
    arguments = "-m", "rpc_pipe", "run", EXAMPLES / name, "--members", members, *run, "--", *options
    return shown(job(folder / f"job{len(list(folder.iterdir()))}", members, *arguments, cwd=folder)[0])


@pytest.mark.parametrize(("members", "ways"), [(4, ("fsdp", "1d", "2d")), (8, ("2.5d", "3d"))])
def test_a_linear_layer_of_four_moves_trains_as_one_process(tmp_path, members, ways):
    """A member receives as many numbers as the formula says; clipping is on."""
    alone = one(tmp_path, "linear_nd.py", "--steps", 1)["2d"]
    options = "--steps", 1, "--ways", *ways
    found = by_members(tmp_path, members, "linear_nd.py", *options, run=("--microbatches", 1))  # in half the time of 2
    told = ast.get_docstring(ast.parse((EXAMPLES / "linear_nd.py").read_text()))
    formulas = dict(re.findall(r"^    (\S+) +(.+?)(?: {2,}.*)?$", told, re.M))
    first, second, sizes = [(16, 16)] * 3 + [(16, 64)], [(16, 16), (64, 16)], {"n": members, "q": 2, "d": members / 4}
    for way in ways:
        assert found[way][:3] == pytest.approx(alone[:3], rel=1e-6), way
        layers = first + ([(k, k) for _, k in second] if way == "1d" else second)
        numbers = sum(eval(formulas[way], sizes | {"R": 16 * 6, "h": h, "k": k}) for h, k in layers)
        assert found[way][3:] == [2 * numbers] * 2, f"{way}: in 2 blocks"


def test_rows_to_experts_or_experts_to_rows_train_as_one_process(tmp_path):
    """A checkpoint of members that have other experts goes on in one process."""
    alone = one(tmp_path, "experts.py", "--steps", 2)["rows"]
    found = by_members(tmp_path, 2, "experts.py", "--steps", 2, "--ways", "rows", "weights", "hot")
    for way, to_experts, to_rows in (("rows", True, False), ("weights", False, True), ("hot", True, True)):
        assert found[way][:3] == pytest.approx(alone[:3], rel=1e-6), way
        assert [count > 0 for count in found[way][3:]] == [to_experts, to_rows]
    options = "--steps", 1, "--ways", "hot", "--homes", "turns"
    by_members(tmp_path, 2, "experts.py", *options, run=("--checkpoint-every", 1))
    resumed = by_members(tmp_path, 1, "experts.py", "--steps", 2, run=("--resume", "checkpoints"))
    assert resumed["rows"][:3] == pytest.approx(alone[:3], rel=1e-6)


def test_experts_that_are_divided_too_train_as_one_process(tmp_path):
    found = by_members(tmp_path, 4, "experts_tensor.py", "--steps", 2)["ted"]
    assert found[:3] == pytest.approx(one(tmp_path, "experts_tensor.py", "--steps", 2)["ted"][:3], rel=1e-6)


def test_a_codec_around_a_cut_saves_bytes(tmp_path):
    plain, coded = one(tmp_path, "coded.py", "--steps", 2).values()
    assert coded[0] == pytest.approx(plain[0], rel=1e-3) and coded[0] != plain[0]
    assert (plain[1] / coded[1], plain[2] / coded[2]) == (pytest.approx(3.87, abs=0.01), 2)
    example = runpy.run_path(str(EXAMPLES / "coded.py"))
    x = torch.randn(4, 32)
    x[1, 0], x[2, 0] = torch.inf, torch.nan
    y = example["Decode"]()(example["Encode"]()(x))
    assert torch.equal(y.isnan().all(1), ~x.isfinite().all(1)), "a loss that is not finite is seen behind the cut"
    assert (y - x)[[0, 3]].abs().max() <= x[[0, 3]].abs().max() / 127
    options = "--workers", 2, "--transport", "local", "--split", "2,2", "--steps", 2
    assert "identical" in python("-m", "rpc_pipe", "verify", f"{EXAMPLES / 'coded.py'}:llama", *options).stdout
