"""Schedules: tables written by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allattn.config import CHOICES, LrConfig, PruneConfig, StageConfig
from allattn.pruning.schedule import Schedule, heads_to_keep, lr_factor, ramp

SQRT_HALF = 0.7071067811865476

LR_TABLES = [
    # schedule, warmup_steps, final, the factor at every step of the stage
    ("constant", 0, 0.0, [1, 1, 1]),
    ("constant", 4, 0.0, [0.25, 0.5, 0.75, 1, 1, 1]),
    ("constant", 8, 0.0, [0.25, 0.5, 0.75, 1]),  # no longer than the stage
    ("linear", 0, 0.0, [1, 0.75, 0.5, 0.25]),
    ("linear", 0, 0.2, [1, 0.8, 0.6, 0.4]),
    ("linear", 0, 1.0, [1, 1, 1]),
    ("linear", 2, 0.0, [0.5, 1, 1, 0.75, 0.5, 0.25]),
    ("cosine", 0, 0.0, [1, (1 + SQRT_HALF) / 2, 0.5, (1 - SQRT_HALF) / 2]),
    ("cosine", 0, 0.5, [1, (3 + SQRT_HALF) / 4, 0.75, (3 - SQRT_HALF) / 4]),
    ("cosine", 3, 0.0, [1 / 3, 2 / 3, 1, 1, 0.75, 0.25]),
    ("inverse_sqrt", 0, 0.0, [1, SQRT_HALF, 1 / math.sqrt(3), 0.5]),
    ("inverse_sqrt", 1, 0.0, [1, SQRT_HALF, 1 / math.sqrt(3), 0.5]),
    ("inverse_sqrt", 4, 0.0, [0.25, 0.5, 0.75, 1, 2 / math.sqrt(5), 2 / math.sqrt(6)]),
]


@pytest.mark.parametrize(("schedule", "warmup", "final", "table"), LR_TABLES)
def test_lr_tables(schedule, warmup, final, table):
    lr = LrConfig(schedule=schedule, warmup_steps=warmup, final=final)
    got = [lr_factor(lr, step, len(table)) for step in range(len(table))]
    assert got == pytest.approx(table, abs=1e-12)


def test_every_schedule_has_a_table():
    assert {row[0] for row in LR_TABLES} == set(CHOICES["stage.lr.schedule"])


def test_inverse_sqrt_far_out():
    assert lr_factor(LrConfig("inverse_sqrt", warmup_steps=4), 15, 1000) == pytest.approx(0.5)


@given(
    schedule=st.sampled_from(CHOICES["stage.lr.schedule"]),
    warmup=st.integers(0, 30),
    final=st.floats(0, 1),
    steps=st.integers(1, 40),
)
def test_factors_rise_to_the_peak_then_never_rise(schedule, warmup, final, steps):
    lr = LrConfig(schedule=schedule, warmup_steps=warmup, final=final)
    factors = [lr_factor(lr, step, steps) for step in range(steps)]
    assert all(0 < f <= 1 + 1e-12 for f in factors)
    peak = min(warmup, steps)
    rising, falling = factors[:peak], factors[max(peak - 1, 0) :]
    assert rising == sorted(rising) and (not rising or rising[-1] == 1)
    assert all(a >= b - 1e-12 for a, b in zip(falling, falling[1:], strict=False))


def test_lookup_at_the_edges_of_stages():
    schedule = Schedule([StageConfig(str(n), steps=n) for n in (3, 1, 4)])
    assert (schedule.ends, schedule.total_steps) == ([3, 4, 8], 8)
    table = {
        0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 0), 4: (2, 0), 5: (2, 1), 7: (2, 3), 8: (2, 4),
    }  # fmt: skip
    assert {step: schedule.lookup(step) for step in table} == table


@pytest.mark.parametrize(
    ("warmup", "table"), [(0, [1, 1]), (1, [1, 1]), (4, [0.25, 0.5, 0.75, 1, 1, 1])]
)
def test_ramp(warmup, table):
    prune = PruneConfig(keep=0.5, warmup_steps=warmup)
    assert [ramp(prune, step) for step in range(len(table))] == table


@pytest.mark.parametrize(
    ("keep", "heads", "left"),
    [
        (0.5, 48, 24), (0.5, 3, 2), (0.5, 1, 1), (0.5, 5, 3), (0.3, 10, 3), (0.25, 10, 3),
        (0.24, 10, 2), (0.0, 10, 0), (1.0, 10, 10), (0.04, 10, 0), (0.05, 10, 1), (0.99, 10, 10),
        (0.1, 128, 13), (0.5, 0, 0), (1.0, 0, 0),
    ],
)  # fmt: skip
def test_heads_to_keep(keep, heads, left):
    assert heads_to_keep(keep, heads) == left


@given(keep=st.floats(0, 1), heads=st.integers(0, 500))
def test_heads_to_keep_is_the_nearest_count(keep, heads):
    left = heads_to_keep(keep, heads)
    assert 0 <= left <= heads and abs(left - keep * heads) <= 0.5 + 1e-9
