from __future__ import annotations

import unittest
from typing import Any

from mainbrella import ConfigurationError, EgressLockedError, EgressPolicy, InvalidResponseError

from .both import both, make_client
from .scripted import CREATED_AT, Request, Server, machine
from .test_use import KEY, Session

LIST = {"policy": "allow-list", "rules": ["packages.example", "*.files.example"]}


def event(sequence: int, **changes: Any) -> dict[str, Any]:
    return {
        "sequence": sequence,
        "timeMs": 1_790_000_000_000 + sequence,
        "outcome": "denied",
        "name": "evil.example",
        "address": None,
        "port": 443,
        "rule": "no-rule",
        "reason": "No rule of the allow-list matches.",
        "newer": 1,
        **changes,
    }


def log(*events: dict[str, Any], more: bool = False, cursor: int | None = None) -> dict[str, Any]:
    return {
        "id": "m-1",
        "createdAt": CREATED_AT,
        "events": list(events),
        "hasMore": more,
        "nextCursor": events[-1]["sequence"] if cursor is None else cursor,
        "denied": 40,
        "wouldDeny": 2,
    }


@both
class Creating(unittest.TestCase):
    def create(self, info: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        with Server([lambda r: r.reply(201, info)]) as server:
            client = make_client(KEY, base_url=server.url)
            sandbox = client.create(**options)
            client.close()
            return sandbox, server.requests[0].json()

    def test_a_policy_can_be_given_in_each_form(self) -> None:
        for given, wire in [
            (["packages.example", "*.files.example"], LIST),
            (("packages.example", "*.files.example"), LIST),
            (EgressPolicy.allow("packages.example", "*.files.example"), LIST),
            (EgressPolicy.allow("a.b", dry_run=True), {"policy": "allow-list", "rules": ["a.b"], "dryRun": True}),
            ([], {"policy": "allow-list"}),
            ("open", {"policy": "open"}),
            ("off", {"policy": "off"}),
        ]:
            sandbox, sent = self.create(machine(egress=wire, internet=wire["policy"] != "off"), egress=given)
            self.assertEqual(sent["egress"], wire)
            self.assertEqual(sandbox.info.egress.wire(), wire)
            self.assertEqual(sandbox.egress.policy, sandbox.info.egress)

    def test_a_word_that_is_no_policy_is_refused_before_anything_is_sent(self) -> None:
        with Server([]) as server:
            client = make_client(KEY, base_url=server.url)
            for bad in ["packages.example", "allow-list", ""]:
                with self.assertRaises(ConfigurationError):
                    client.create(egress=bad)
            client.close()
            self.assertEqual(server.requests, [])

    def test_a_service_that_knows_no_policies_is_understood(self) -> None:
        for internet, kind in [(True, "open"), (False, "off")]:
            sandbox, sent = self.create(machine(internet=internet))
            self.assertNotIn("egress", sent)
            self.assertEqual(sandbox.info.egress, EgressPolicy(kind))


@both
class Using(unittest.TestCase):
    def test_a_change_is_sent_once_and_learned(self) -> None:
        with Session(lambda r: r.reply(200, machine(egress=LIST))) as (sandbox, server):
            info = sandbox.egress.set(["packages.example", "*.files.example"])
            sent = server.requests[1]
            self.assertEqual((sent.method, sent.path), ("PUT", "/v1/machines/m-1/egress"))
            self.assertEqual((sent.query, sent.json()), ({"createdAt": CREATED_AT}, LIST))
            self.assertEqual((info.egress.wire(), sandbox.egress.policy.wire()), (LIST, LIST))

    def test_off_stays_off(self) -> None:
        with Session(lambda r: r.error(409, "egress_locked")) as (sandbox, _):
            with self.assertRaises(EgressLockedError) as caught:
                sandbox.egress.set("open")
            self.assertFalse(caught.exception.ambiguous)

    def test_an_explanation_is_read_whole(self) -> None:
        said = {
            "host": "a.example",
            "port": 22,
            "outcome": "denied",
            "allowedBy": None,
            "deniedBy": "reserved",
            "reason": "It leads inwards.",
            "addresses": [{"address": "10.0.0.1", "reserved": "private"}, {"address": "192.0.2.1", "reserved": None}],
        }
        allowed = {**said, "outcome": "would-deny", "addresses": []}
        with Session(lambda r: r.reply(200, said), lambda r: r.reply(200, allowed)) as (sandbox, server):
            e = sandbox.egress.explain("a.example", 22)
            self.assertEqual(server.requests[1].query, {"createdAt": CREATED_AT, "host": "a.example", "port": "22"})
            self.assertEqual((e.allowed, e.denied_by, e.reason), (False, "reserved", "It leads inwards."))
            self.assertEqual([(a.address, a.reserved) for a in e.addresses], [("10.0.0.1", "private"), ("192.0.2.1", None)])
            self.assertTrue(sandbox.egress.explain("a.example").allowed)

    def test_events_follow_pages(self) -> None:
        def first(r: Request) -> None:
            self.assertEqual(r.query["cursor"], "0")
            r.reply(200, log(event(1), event(5, name=None, address="8.8.8.8"), more=True))

        def second(r: Request) -> None:
            self.assertEqual(r.query["cursor"], "5")
            r.reply(200, log(event(6, outcome="would-deny")))

        with Session(first, second) as (sandbox, _):
            events = list(sandbox.egress.events())
        self.assertEqual([e.sequence for e in events], [1, 5, 6])
        self.assertEqual((events[1].name, events[1].address, events[2].outcome), (None, "8.8.8.8", "would-deny"))

    def test_a_page_says_how_many_there_were_in_all(self) -> None:
        with Session(lambda r: r.reply(200, log(cursor=7))) as (sandbox, server):
            page = sandbox.egress.log(cursor=7, limit=3)
            self.assertEqual(server.requests[1].query, {"createdAt": CREATED_AT, "cursor": "7", "limit": "3"})
            self.assertEqual((page.denied, page.would_deny, page.next_cursor, page.events), (40, 2, 7, ()))
            with self.assertRaises(ConfigurationError):
                sandbox.egress.log(cursor=-1)

    def test_a_page_that_promises_more_and_holds_nothing_is_refused(self) -> None:
        with Session(lambda r: r.reply(200, log(more=True, cursor=0))) as (sandbox, _):
            with self.assertRaises(InvalidResponseError):
                list(sandbox.egress.events())


if __name__ == "__main__":
    unittest.main()
