"""`RowProcessor`s that the library does not have: how a manager calls them, and their errors."""

import logging

from logits_requests import request, serve

from gptmanager.decoding.processors.rows import RowProcessor, RowSession
from gptmanager.request.post_processor import BoundProcessor


class Failing(RowProcessor, RowSession):
    """Fails in its second step."""

    def __init__(self):
        self.num_rows = []

    def open(self, num_lines, stream):
        return self

    def load(self, line, bound):
        pass

    def process(self, rows):
        self.num_rows.append(len(rows.index))
        assert len(self.num_rows) < 2, "it fails"
        return {}


def test_the_beams_of_a_request_are_logged_as_one_request(caplog):
    caplog.set_level(logging.WARNING, logger="gptmanager")
    bound = BoundProcessor(Failing())
    asked = [request(i, beam_width=2, logits_post_processor=bound) for i in (1, 2)]
    host = serve(asked, max_beam_width=2, logits_post_processor_budget_s=0.0)
    assert bound.owner.num_rows == [2, 4]  # in the context phase there is one beam
    assert all("it fails" in host.final(i).error for i in (1, 2))
    slow, failed, _ = [record.getMessage() for record in caplog.records]
    assert "s for 2 requests (the first: 1)" in slow
    assert failed == "logits_post_processor Failing failed; it ends the requests [1, 2]"
