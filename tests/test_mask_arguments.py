"""Masks, lengths, ranges, segments, windows, offsets, soft caps and sinks that do not fit, beyond those in
`test_arguments.py`; and those of inputs without a batch axis."""

import functools
import re

import jax
import numpy as np
import pytest

import jttt
from tests.dense import Sizes

SIZES = Sizes(B=2, T=4, S=6, N=2, K=1, H=3, E=3)


def ones(*shape, dtype="int32"):
    return np.ones(shape, dtype)


# Of every message the beginning: the argument, what it was, what is expected.
MISFITS = [
    (dict(mask=ones(4, 6)), TypeError, "mask has dtype int32: expected bool"),
    (dict(mask=ones(3, 1, 4, 6, dtype=bool)), ValueError,
     "mask has shape [3, 1, 4, 6]: expected it to broadcast to [B, N, T, S] = [2, 2, 4, 6]"),
    (dict(mask=ones(1, 2, 2, 4, 6, dtype=bool)), ValueError,
     "mask has shape [1, 2, 2, 4, 6]: expected it to broadcast to [B, N, T, S] = [2, 2, 4, 6]"),
    (dict(bias=ones(4, 6, dtype=bool)), TypeError, "bias has dtype bool: expected a floating dtype"),
    (dict(query_seq_lengths=ones(2, dtype="int16")), TypeError, "query_seq_lengths has dtype int16: expected int32"),
    (dict(query_seq_lengths=ones(1)), ValueError, "query_seq_lengths has shape [1]: expected [B] = [2]"),
    (dict(key_value_seq_lengths=ones()), ValueError, "key_value_seq_lengths has shape []: expected [B] = [2]"),
    (dict(key_value_seq_lengths=ones(2, 1)), ValueError, "key_value_seq_lengths has shape [2, 1]: expected [B] = [2]"),
    (dict(local_window_size=(3, -1)), ValueError,
     "local_window_size was (3, -1): expected an int of at least 0"),
    (dict(local_window_size=(None, 0)), ValueError,
     "local_window_size was (None, 0): expected an int of at least 0"),
    (dict(query_offset=ones(2, dtype="uint8")), TypeError, "query_offset has dtype uint8: expected int32"),
    (dict(query_offset=ones(2, 1)), ValueError, "query_offset has shape [2, 1]: expected it to broadcast to [B] = [2]"),
    (dict(key_start=ones(4, dtype=bool)), TypeError, "key_start has dtype bool: expected int32"),
    (dict(key_end=ones(1, 2, 4)), ValueError,
     "key_end has shape [1, 2, 4]: expected it to broadcast to [B, length] = [2, 4]"),
    (dict(query_segment_ids=ones(2, 4), key_value_segment_ids=ones(6)), ValueError,
     "key_value_segment_ids has shape [6]: expected [B, length] = [2, 6]"),
    (dict(query_segment_ids=ones(2, 4), key_value_segment_ids=ones(2, 6, dtype="uint32")), TypeError,
     "key_value_segment_ids has dtype uint32: expected int32"),
    (dict(logits_soft_cap=-30), ValueError, "logits_soft_cap was -30: expected a number from 1e-30 to 1e30, or None"),
    (dict(logits_soft_cap=np.inf), ValueError,
     "logits_soft_cap was inf: expected a number from 1e-30 to 1e30, or None"),
    (dict(logits_soft_cap=np.nan), ValueError,
     "logits_soft_cap was nan: expected a number from 1e-30 to 1e30, or None"),
    (dict(logits_soft_cap="30"), ValueError, "logits_soft_cap was '30': expected a number from 1e-30 to 1e30, or None"),
    (dict(sinks=ones(1, dtype="float32")), ValueError, "sinks has shape [1]: expected [N] = [2]"),
    (dict(sinks=ones(2, 2, dtype="float32")), ValueError, "sinks has shape [2, 2]: expected [N] = [2]"),
]


@pytest.mark.parametrize(("arguments", "exception", "message"), MISFITS, ids=[message[:60] for *_, message in MISFITS])
def test_refused_at_trace_time(arguments, exception, message):
    with pytest.raises(exception, match="^" + re.escape(message)):
        jax.eval_shape(functools.partial(jttt.dot_product_attention, **arguments), *SIZES.draw().values())


# For inputs without a batch axis. Each hides some keys.
UNBATCHED = {
    "query_seq_lengths": dict(query_seq_lengths=np.array(3, np.int32)),
    "key_value_seq_lengths": dict(key_value_seq_lengths=np.array(4, np.int32)),
    "query_offset": dict(query_offset=np.array(1, np.int32), is_causal=True),
    "key_start": dict(key_start=np.array([0, 1, 2, 3], np.int32)),
    "key_end": dict(key_end=np.array([6, 5, 4, 3], np.int32)),
    "segments": dict(query_segment_ids=np.array([0, 0, 1, 1], np.int32),
                     key_value_segment_ids=np.array([0, 0, 0, 1, 1, 2], np.int32)),
    "mask": dict(mask=np.stack([np.tri(4, 6, dtype=bool), np.tri(4, 6, 2, dtype=bool)])),
    "bias": dict(bias=np.linspace(-2, 2, 48, dtype=np.float32).reshape(2, 4, 6)),
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", UNBATCHED)
def test_a_batch_axis_may_be_left_out_where_query_has_none(name):
    query, key, value = (x[:1] for x in SIZES.draw().values())
    without = UNBATCHED[name]
    batched = {name: x[None] if isinstance(x, np.ndarray) else x for name, x in without.items()}
    (expected,) = jttt.dot_product_attention(query, key, value, **batched)
    assert not np.allclose(expected, jttt.dot_product_attention(query, key, value)[0])
    for arguments in (batched, without):
        np.testing.assert_array_equal(jttt.dot_product_attention(query[0], key[0], value[0], **arguments), expected)
