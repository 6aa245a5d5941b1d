"""The sign-flip test against all flips by hand and against the binomial distribution."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from allattn.analysis.significance import DRAWS, MAX_EXACT, holm, sign_flip_test, units


def all_flips(difference: list[float]) -> float:
    """The p-value in fractions of all 2^n flips, one by one."""
    seen = abs(math.fsum(difference))
    signs = list(itertools.product([1, -1], repeat=len(difference)))
    far = [abs(math.fsum(s * d for s, d in zip(flip, difference, strict=True))) for flip in signs]
    return sum(f >= seen - 1e-9 for f in far) / len(signs)


def two_sided_binomial(n: int, k: int) -> float:
    """P(|n - 2K| >= |n - 2k|), K of n fair coins: the test's p where all sizes are the same."""
    far = [i for i in range(n + 1) if abs(n - 2 * i) >= abs(n - 2 * k)]
    return sum(math.comb(n, i) for i in far) / 2**n


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_few_units_are_exact(n):
    difference = np.random.default_rng(n).normal(0.3, 1, (6, n))
    difference[4] = np.round(difference[4])  # ties
    difference[5] = 0.1  # sums of it differ in the last bit
    expected = [all_flips(row.tolist()) for row in difference]
    np.testing.assert_allclose(sign_flip_test(difference), expected, rtol=0, atol=1e-15)


def test_hand_made_cases():
    assert sign_flip_test(np.array([[1.0, 2.0, 4.0]])) == 2 / 8
    assert sign_flip_test(np.array([[1.0, -2.0, 4.0]])) == 6 / 8  # all but +-1 as the sum
    assert sign_flip_test(np.array([[3.0, -1.0, -2.0]])) == 1
    assert sign_flip_test(np.zeros((0, 4))).shape == (0,)


@pytest.mark.parametrize("n", [12, MAX_EXACT, MAX_EXACT + 1, 60])
def test_equal_sizes_give_the_binomial_distribution(n):
    ks = [0, n // 4, n // 3, n // 2]
    difference = np.array([[-0.7] * k + [0.7] * (n - k) for k in ks])
    expected = np.array([two_sided_binomial(n, k) for k in ks])
    got = sign_flip_test(difference)
    if n <= MAX_EXACT:
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-15)
    else:
        error = np.sqrt(expected * (1 - expected) / DRAWS)
        assert (np.abs(got - expected) < 4 * error + 1.5 / DRAWS).all()
        assert got.min() >= 1 / (DRAWS + 1)


@pytest.mark.parametrize("n", [8, 40])
def test_no_difference_is_no_evidence(n):
    difference = np.zeros((2, n))
    difference[1, 0] = 1e-9
    assert sign_flip_test(difference).tolist() == [1, 1]  # one unit alone proves nothing either


def test_the_seed_decides():
    difference = np.random.default_rng(0).normal(0.2, 1, (5, 40))
    assert np.array_equal(sign_flip_test(difference, 3), sign_flip_test(difference, 3))
    assert not np.array_equal(sign_flip_test(difference, 3), sign_flip_test(difference, 4))


def test_where_nothing_differs_p_values_are_even():
    difference = np.random.default_rng(1).standard_t(3, (1500, 12))
    p = sign_flip_test(difference)
    for level in (0.05, 0.2, 0.5):
        assert abs((p <= level).mean() - level) < 4 * math.sqrt(level * (1 - level) / len(p))


def test_holm_by_hand():
    # sorted .01 .02 .03 .04, times 4 3 2 1: .04 .06 .06 .04, and none below the one before
    got = holm(np.array([0.03, 0.01, 0.04, 0.02]))
    np.testing.assert_allclose(got, [0.06, 0.04, 0.06, 0.06])
    assert holm(np.array([0.5, 0.9])).tolist() == [1, 1]
    assert holm(np.array([])).shape == (0,)


def test_units_cover_every_segment_once():
    difference = np.random.default_rng(0).normal(size=(3, 2, 11))
    sums = units(difference, mem_len=6, seq_len=4)  # four segments at least: 5 and 6 a lane
    lane = [[row[:5].sum(), row[5:].sum()] for row in difference.reshape(6, 11)]
    np.testing.assert_allclose(sums, np.reshape(lane, (3, 4)))
    # twice the memory: 20 tokens are five segments, so two units; 24 are six, so one
    assert units(difference, mem_len=10, seq_len=4).shape == (3, 4)
    one = units(difference, mem_len=12, seq_len=4)
    np.testing.assert_allclose(one, difference.sum(2))
    np.testing.assert_allclose(units(difference[..., :3], 6, 4), difference[..., :3].sum(2))
