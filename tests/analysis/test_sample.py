"""The sample is the same text whatever the batch size."""

import numpy as np
import pytest
import torch

from allattn.analysis.sample import take_sample


@pytest.mark.parametrize("batch_size", [1, 3, 8, 50])
def test_every_lane_comes_once_whatever_the_batch_size(batch_size):
    tokens = np.arange(1000)
    sample = take_sample(tokens, seq_len=10, n_tokens=400)
    seen, counted = [], []
    for stream in sample.streams(batch_size, counted.append):
        pairs = list(stream)
        assert all(len(ids) <= batch_size and ids.shape == (len(ids), 10) for ids, _ in pairs)
        assert all(torch.equal(ids + 1, targets) for ids, targets in pairs)
        seen += torch.cat([ids for ids, _ in pairs], dim=1).tolist()
    expected = [list(range(lane * 124, lane * 124 + 50)) for lane in range(8)]
    assert seen == expected
    assert sum(counted) == sample.n_tokens == 400


def test_a_short_text_gives_all_its_segments():
    sample = take_sample(np.arange(35), seq_len=10, n_tokens=100_000)
    assert (sample.lanes.n_lanes, sample.n_segments, sample.n_tokens) == (3, 1, 30)
    with pytest.raises(ValueError, match="too few"):
        take_sample(np.arange(5), seq_len=10, n_tokens=100)
