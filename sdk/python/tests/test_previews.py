from __future__ import annotations

import pickle
import unittest
from typing import Any

from mainbrella import (
    ConflictError,
    IdempotencyConflictError,
    InvalidResponseError,
    MainbrellaError,
    PreviewEndedError,
    PreviewLimitError,
    PreviewReconciliationRequiredError,
)

from .both import both
from .scripted import CREATED_AT, Request
from .test_use import Session

PREVIEW = {"id": "pv-1", "port": 3000, "createdAtMs": 5, "expiresAt": 900_005, "newer": 1}
URLS = {"url": "http://t.localhost:8788/", "pathUrl": "http://localhost:8788/p/t/"}


def issued(r: Request) -> None:
    r.reply(201, {**PREVIEW, **URLS})


def failure(status: int, code: str, **more: Any) -> Any:
    body = {"code": code, "message": "No.", "hint": "Do otherwise.", "requestId": "r", **more}
    return lambda r: r.reply(status, body)


@both
class Previews(unittest.TestCase):
    def test_one_is_made_listed_renewed_and_revoked(self) -> None:
        def listed(r: Request) -> None:
            r.reply(200, {"previews": [PREVIEW]})

        def renewed(r: Request) -> None:
            r.reply(200, {**PREVIEW, "expiresAt": 7})

        with Session(issued, listed, renewed, lambda r: r.reply(204, None)) as (sandbox, server):
            preview = sandbox.previews.create(3000, ttl_seconds=900)
            self.assertEqual(preview["url"], URLS["url"])
            self.assertEqual(preview["pathUrl"], URLS["pathUrl"])
            self.assertEqual((preview["id"], preview["port"], preview["expiresAt"]), ("pv-1", 3000, 900_005))
            made = server.requests[1]
            self.assertEqual((made.path, made.query), ("/v1/machines/m-1/previews", {"createdAt": CREATED_AT}))
            self.assertEqual(made.json(), {"port": 3000, "ttlSeconds": 900})
            self.assertTrue(made.headers["idempotency-key"])
            previews = sandbox.previews.list()["previews"]
            self.assertEqual([p["id"] for p in previews], ["pv-1"])
            self.assertNotIn("url", previews[0])
            self.assertEqual(sandbox.previews.renew("pv-1", 60)["expiresAt"], 7)
            self.assertEqual(server.requests[3].path, "/v1/machines/m-1/previews/pv-1/renew")
            self.assertEqual(server.requests[3].json(), {"ttlSeconds": 60})
            sandbox.previews.revoke(preview["id"])
            gone = server.requests[4]
            self.assertEqual((gone.method, gone.path), ("DELETE", "/v1/machines/m-1/previews/pv-1"))

    def test_a_lost_response_is_asked_for_again_under_the_same_key(self) -> None:
        with Session(lambda r: r.cut(), failure(503, "overloaded"), issued) as (sandbox, server):
            self.assertEqual(sandbox.previews.create(3000, idempotency_key="mine")["url"], URLS["url"])
            keys = [r.headers["idempotency-key"] for r in server.requests[1:4]]
            self.assertEqual(keys, ["mine"] * 3)

    def test_refusals_have_classes_of_their_own(self) -> None:
        cases: list[tuple[Any, type[MainbrellaError], tuple[type[MainbrellaError], ...]]] = [
            (failure(409, "preview_limit"), PreviewLimitError, (ConflictError,)),
            (failure(410, "preview_ended"), PreviewEndedError, (MainbrellaError,)),
            (failure(409, "idempotency_conflict"), IdempotencyConflictError, (ConflictError,)),
        ]
        for answer, kind, bases in cases:
            with Session(answer) as (sandbox, server):
                with self.assertRaises(kind) as caught:
                    sandbox.previews.create(3000)
                self.assertIsInstance(caught.exception, bases)
                self.assertEqual(len(server.requests), 2, "an answer is an answer")

    def test_a_preview_without_its_url_names_itself(self) -> None:
        answer = failure(409, "preview_reconciliation_required", previewId="pv-9")
        with Session(answer, lambda r: r.reply(204, None)) as (sandbox, server):
            with self.assertRaises(PreviewReconciliationRequiredError) as caught:
                sandbox.previews.create(3000)
            error = caught.exception
            self.assertEqual(error.preview_id, "pv-9")
            self.assertEqual(pickle.loads(pickle.dumps(error)).preview_id, "pv-9")
            assert error.preview_id is not None
            sandbox.previews.revoke(error.preview_id)
            self.assertTrue(server.requests[2].path.endswith("/previews/pv-9"))

    def test_an_answer_without_a_url_is_none(self) -> None:
        with Session(*[lambda r: r.reply(201, PREVIEW)] * 6) as (sandbox, _), self.assertRaises(InvalidResponseError):
            sandbox.previews.create(3000)
