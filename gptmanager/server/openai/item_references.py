"""Replaces items of type `item_reference` in the input of /v1/responses by stored items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import field_error
from gptmanager.server.openai.response_store import ResponseStore
from gptmanager.server.openai.response_writer import response_of_item


def resolved(items: Sequence[Any], store: ResponseStore | None, owner: str) -> list[Any]:
    """Return the items of a request, with each reference replaced by the stored output item.

    Each stored item can be referred to only once, so that the result is never larger than the
    request and the store together. Raises ApiError (400) for an id that is not stored for `owner`,
    and for a second reference to the same item.
    """
    outputs: dict[str, dict[Any, Any]] = {}  # response id -> item id -> unused item
    found = []
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or item.get("type") != "item_reference":
            found.append(item)
            continue
        where, own_id = f"input[{index}].id", item.get("id")
        if not isinstance(own_id, str):
            raise field_error(where, f"{quoted(own_id)} must be the id of a stored item")
        name = response_of_item(own_id)
        if name not in outputs:
            stored = None if store is None else store.find(owner, name)
            output = [] if stored is None else orjson.loads(stored.response)["output"]
            outputs[name] = {one["id"]: one for one in output}
        try:
            found.append(outputs[name].pop(own_id))
        except KeyError:
            what = f"{where}: no item {quoted(own_id)} is stored, or it is in the input twice"
            raise ApiError(400, what, param=where, code="item_not_found") from None
    return found
