"""The batcher rejects calls of clients that have disconnected before the calls are queued."""

from collections.abc import Callable

import pytest

from bertsmith.serve.batching import Batcher
from bertsmith.serve.deadline import Deadline, DisconnectedError
from bertsmith.serve.rate_limits import TokenBucket
from tests.serve.test_batching import FakeModel, start_first_batch


def cancel_before_submit(deadline: Deadline, _: TokenBucket) -> None:
    """Disconnect the client before its call is submitted."""
    deadline.cancel()


def cancel_while_charging(deadline: Deadline, bucket: TokenBucket) -> None:
    """Disconnect the client when its tokens are charged, just before its call is queued."""
    take = bucket.take

    def take_and_cancel(amount: float) -> float:
        deadline.cancel()
        return take(amount)

    bucket.take = take_and_cancel  # type: ignore[method-assign]


@pytest.mark.parametrize("disconnect", [cancel_before_submit, cancel_while_charging])
@pytest.mark.parametrize("heavy_client", ["a", "b"], ids=["same-client", "other-client"])
def test_call_of_a_disconnected_client_has_no_effect(
    disconnect: Callable[[Deadline, TokenBucket], None], heavy_client: str
) -> None:
    """With a full queue, it gets DisconnectedError, evicts no call, and uses up no tokens.

    A connected client "a" would get BusyError, or evict a call of client "b", who has sent more.
    """
    model = FakeModel()
    batcher = Batcher(
        max_batch_tokens=100, max_queue_tokens=200, max_call_tokens=500, max_wait_seconds=0.0
    )
    start_first_batch(batcher, model)
    try:
        queued = [
            batcher.submit("key", model, [(100, number)], Deadline(60, heavy_client))
            for number in range(2)
        ]
        bucket = TokenBucket(100.0, clock=lambda: 0.0)
        deadline = Deadline(60, "a", bucket)
        disconnect(deadline, bucket)
        with pytest.raises(DisconnectedError):
            batcher.submit("key", model, [(100, 2)], deadline)
        assert batcher.queued_tokens == 200
        assert TokenBucket.take(bucket, 100) == 0
        model.resume.set()
        assert [future.result(60) for future in queued] == [[0], [2]]
    finally:
        model.resume.set()
        batcher.close(60)
