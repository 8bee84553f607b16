"""Opens the journal of a manager, and passes its unfinished requests to the manager's host."""

from __future__ import annotations

from gptmanager.config import OptionalParams
from gptmanager.host.callback_host import CallbackHost
from gptmanager.host.loop_host import LoopHost
from gptmanager.journal.accepted import AcceptedRequests
from gptmanager.journal.journal import Journal
from gptmanager.journal.journaled_host import JournaledHost
from gptmanager.journal.resuming import resume
from gptmanager.lifecycle.log import logger


def open_journal(
    params: OptionalParams, callbacks: CallbackHost, host: LoopHost, checkpoint: str
) -> JournaledHost:
    """Return a host that passes calls on to `host` and records them in the journal of `params`.

    `callbacks` has the callbacks that `host` calls. `checkpoint` is the digest of the checkpoint.
    Raise the errors of `Journal`, and CallbackError if `restore_cb` fails.
    """
    assert params.journal_path is not None
    journal = Journal(
        params.journal_path,
        checkpoint,
        sync=params.journal_sync,
        on_full=params.journal_on_full,
        keeps_responses=params.restore_cb is not None,
    )
    try:
        accepted = AcceptedRequests(journal.folder, params.seed, syncs=journal.syncs)
        found = resume(journal, accepted, params)
        journal.commit(None, [(request_id, b"") for request_id in found.ended])
        first = found.requests[: params.max_batch_size]  # at most these run at first
        journal.note_resumed([request.request_id for request in first])
        journaled = JournaledHost(host, journal, accepted, callbacks.lifecycle.check)
    except BaseException:
        journal.close()
        raise
    callbacks.journal = journaled
    journaled.held.extend(found.responses)
    for request_id, _, is_final, _ in found.responses:
        if is_final:
            callbacks.receiver.owed.owe(request_id)
    callbacks.receiver.restore(found.requests, found.progress)
    if found.requests or found.responses:
        logger.info(
            "the journal %s: requests that continue: %d, responses that are sent first: %d",
            *(params.journal_path, len(found.requests), len(found.responses)),
        )
    return journaled
