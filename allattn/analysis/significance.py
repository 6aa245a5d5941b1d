"""Is a difference of losses more than chance? A paired test over stretches of the same text."""

from __future__ import annotations

import numpy as np

MAX_EXACT = 17  # units up to which all flips are tried: 2^16, as a flip of all changes nothing
DRAWS = 2**16 - 1
_CHUNK = 4096  # flips looked at together


def units(difference: np.ndarray, mem_len: int, seq_len: int) -> np.ndarray:
    """Sums over stretches of text that are wide enough to count as independent.

    A unit is some consecutive segments of one lane: at least four, and at least twice the memory,
    so that most of it neither shares its memory nor its subject with its neighbours. A lane with
    fewer is one unit. (Measured on the demo: differences of single segments correlate with those
    of the next by 0.00 on valid and 0.05 on test, on average over heads.)

    Args:
        difference: [..., lanes, segments].
        mem_len: positions that a layer remembers.
        seq_len: tokens a segment.

    Returns:
        [..., units].
    """
    *tests, n_lanes, n_segments = difference.shape
    width = max(4, -(-2 * mem_len // seq_len))
    per_lane = max(1, n_segments // width)
    starts = np.arange(per_lane) * n_segments // per_lane
    sums = np.add.reduceat(difference, starts, axis=-1)
    return sums.reshape(*tests, n_lanes * per_lane)


def sign_flip_test(difference: np.ndarray, seed: int = 1) -> np.ndarray:
    """Two-sided p-values of paired differences, without a normal distribution (Fisher 1935).

    If neither of two models is better, a unit's difference might as well have had the other sign:
    p is the share of all flips whose sum is at least as far from 0 as the one seen. Up to MAX_EXACT
    units all flips are tried; beyond, DRAWS random ones and the one seen. No p-value can be below
    2^(1 - units) or 1 / (DRAWS + 1).

    Args:
        difference: [tests, units].
        seed: of the random flips, which all tests share.

    Returns:
        [tests]; 1 where all differences are 0.
    """
    n = difference.shape[1]
    # sums that are equal on paper may differ in the last bits
    limit = np.abs(difference.sum(1)) - 1e-12 * np.abs(difference).sum(1)
    exact = n <= MAX_EXACT
    total = 2 ** (n - 1) if exact else DRAWS
    rng = np.random.default_rng([seed, 0x51F7])
    extreme = np.zeros(len(difference), dtype=np.int64)
    for start in range(0, total, _CHUNK):
        numbers = np.arange(start, min(start + _CHUNK, total))
        if exact:
            bits = numbers[:, None] >> np.arange(n) & 1
        else:
            bits = rng.integers(0, 2, (len(numbers), n))
        extreme += (np.abs((1.0 - 2.0 * bits) @ difference.T) >= limit).sum(0)
    return extreme / total if exact else (extreme + 1) / (total + 1)


def holm(p_values: np.ndarray) -> np.ndarray:
    """p-values corrected for the number of tests (Holm 1979), whatever their dependence.

    Rejecting those below a level makes even one false rejection no likelier than that level.

    Args:
        p_values: [tests].

    Returns:
        [tests], none above 1.
    """
    order = np.argsort(p_values, kind="stable")
    steps = p_values[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected
