"""What a coordinator has promised survives it."""

from dataclasses import replace

import pytest

from rollout.errors import ConfigError, UpdateInProgress
from rollout.fleet.record import FILE, Record


def test_a_promise_is_there_for_the_next_under_a_higher_fence(tmp_path):
    with Record(tmp_path) as record:
        assert (record.promise.fence, record.promise.version) == (1, 0)
        promise = replace(record.promise, version=7, digest=(1 << 64) - 1, update_id="u")
        record.write(promise)
    with Record(tmp_path) as record:
        assert record.promise == replace(promise, fence=2)


def test_one_coordinator_has_a_record_at_a_time(tmp_path):
    with Record(tmp_path), pytest.raises(UpdateInProgress, match="one at a time"):
        Record(tmp_path)
    Record(tmp_path).close()


def test_what_is_no_record_is_refused_by_name(tmp_path):
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=FILE):
        Record(tmp_path)
    with pytest.raises(ConfigError, match="cannot be kept"):
        Record("/proc/nowhere")
