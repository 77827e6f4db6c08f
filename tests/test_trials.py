"""The trials of `tests/trials` run: a few cases of each, drawn as a long campaign draws them."""

import random

import pytest
from crossings import tried
from trials import crossings, deaths, fuzz, pauses

pytestmark = pytest.mark.filterwarnings("ignore")

#: runs that take little time, by whether the model has a forward of its own
_RUNS = [(False, [101, 104, 108, 115]), (True, [104])]


@pytest.mark.parametrize(("whole", "numbers"), _RUNS, ids=["layers", "whole"])
def test_random_models_train_as_one_process_does(whole, numbers):
    assert {fuzz.tried(number, whole)[0].how for number in numbers} == {"identical"}


def test_jobs_of_several_dimensions_train_as_one_process_does():
    assert {tried(crossings.drawn(seed, with_members=False)).how for seed in (1, 4)} == {"same"}


def test_a_random_death_costs_no_bit():
    kills, outside = deaths.drawn(random.Random(8), 2, "step")
    found, said = deaths.run("1f1b", 2, "step", kills, outside, [], steps=8)
    assert (found, said.count("is gone (SIGKILL): epoch")) == (deaths.undisturbed("1f1b", 2, "step", steps=8)[0], 2)


def test_a_job_whose_processes_pause_ends_as_without(tmp_path):
    pauses.write(tmp_path)
    assert pauses.tried(3, tmp_path) == ""
