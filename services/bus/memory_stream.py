"""A stream in memory: what JetStream does for `store` and `follow`."""

from dataclasses import replace

from services.bus.mailbox import Mailbox
from services.bus.subjects import matches
from services.bus.types import Delivery, Start


class MemoryStream:
    """Messages in order, numbered from 1, each message id once; with `last_per_subject` only the newest of each."""

    def __init__(self, subjects: list[str], last_per_subject: bool) -> None:
        self.subjects, self.last_per_subject = subjects, last_per_subject
        self.messages: list[Delivery] = []
        self.last_sequence = 0
        self.sequence_of: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self._followers: list[tuple[Mailbox, str]] = []

    def append(self, delivery: Delivery, message_id: str | None) -> int:
        """Hold a message and pass it on; a known id changes nothing and returns its first sequence."""
        if message_id is not None and message_id in self.sequence_of:
            return self.sequence_of[message_id]
        self.last_sequence += 1
        kept = replace(delivery, sequence=self.last_sequence, reply="")
        if message_id is not None:
            self.sequence_of[message_id] = self.last_sequence
        if self.last_per_subject:
            self.messages = [m for m in self.messages if m.subject != kept.subject]
        self.messages.append(kept)
        for mailbox, subject in self._followers:
            if matches(subject, kept.subject):
                mailbox.offer(kept)
        return self.last_sequence

    def join(self, mailbox: Mailbox, subject: str, start: Start) -> None:
        """Give `mailbox` what `start` names, then everything new."""
        held = [m for m in self.messages if matches(subject, m.subject)]
        if start == "new":
            held = []
        elif start == "last_per_subject":
            newest = {m.subject: m.sequence for m in held}
            held = [m for m in held if newest[m.subject] == m.sequence]
        elif isinstance(start, int):
            held = [m for m in held if m.sequence is not None and m.sequence >= start]
        for message in held:
            mailbox.offer(message)
        self._followers.append((mailbox, subject))

    def leave(self, mailbox: Mailbox) -> None:
        self._followers = [(m, s) for m, s in self._followers if m is not mailbox]
