"""Following the directory's word on which copies are referenced: in order, or from a full message on."""

from schemas.kv import KvReference

MAX_HELD_BACK = 1024


class ReferenceFollower:
    """Puts `kv.reference` messages in order. While `behind`, the full state has to be asked for.

    Messages of an older incarnation of the directory, duplicates and late ones are ignored; what comes after a gap is
    held back until the full message closes it. An older incarnation leaves us behind too: if no newer directory lives,
    this one learns from our question above what it has to speak.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self.seq = 0
        self.behind = True
        self.ignored = 0
        self.gaps = 0
        self._held_back: dict[int, KvReference] = {}

    def accept(self, message: KvReference) -> list[KvReference]:
        """The messages to apply now, in order."""
        if message.incarnation < self.incarnation or (
            message.incarnation == self.incarnation and message.seq <= self.seq and not (message.full and self.behind)
        ):
            self.ignored += 1
            self.behind |= message.incarnation < self.incarnation
            return []
        if message.incarnation > self.incarnation:
            self.incarnation, self.seq, self.behind = message.incarnation, 0, True
            self._held_back.clear()
        if message.full:
            self.seq, self.behind = message.seq, False
            return [message, *self._following()]
        if self.behind or message.seq != self.seq + 1:
            self.gaps += not self.behind
            self.behind = True
            if len(self._held_back) < MAX_HELD_BACK:
                self._held_back[message.seq] = message
            return []
        self.seq = message.seq
        return [message]

    def lose(self) -> None:
        """Messages may have been lost, and nothing after them would show it."""
        self.behind = True

    def _following(self) -> list[KvReference]:
        """What was held back and follows the full message without a gap."""
        ready: list[KvReference] = []
        while self.seq + 1 in self._held_back:
            self.seq += 1
            ready.append(self._held_back.pop(self.seq))
        self._held_back = {seq: late for seq, late in self._held_back.items() if seq > self.seq}
        self.behind = bool(self._held_back)
        return ready
