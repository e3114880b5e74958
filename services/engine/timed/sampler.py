"""Draws the tokens of an answer: made up, but the same on every node for the same context."""

from schemas.serve import Finish
from services.engine.timed.settings import TimedSettings
from services.engine.timed.state import TimedLeg

_UNIT = 1 << 32


class Sampler:
    """Turns a context into its next token."""

    def __init__(self, settings: TimedSettings) -> None:
        self._settings = settings

    def peek(self, leg: TimedLeg) -> int:
        """The token that follows from the context."""
        settings, sampling = self._settings, leg.leg.sampling
        if leg.reply is not None and (leg.delivered < len(leg.reply) or not sampling.ignore_eos):
            return leg.reply[leg.delivered] if leg.delivered < len(leg.reply) else self._end_of(leg)
        number = leg.context.next_number()
        may_end = not sampling.ignore_eos and leg.delivered + 1 >= sampling.min_new_tokens
        if may_end and (number >> 32) < settings.eos_probability * _UNIT:
            return settings.eos_token
        return settings.lowest_token + number % (settings.highest_token - settings.lowest_token + 1)

    def draw(self, leg: TimedLeg) -> tuple[int, Finish | None]:
        """The next token, now part of the context, and the answer's end if it is the last one."""
        settings, sampling = self._settings, leg.leg.sampling
        token = self.peek(leg)
        leg.context.append(token)
        leg.delivered += 1
        scripted_end = leg.reply is not None and leg.delivered > len(leg.reply) and not sampling.ignore_eos
        stops = (
            scripted_end
            or token in sampling.stop_token_ids
            or (token == settings.eos_token and settings.eos_probability > 0 and not sampling.ignore_eos)
        )
        if stops and leg.delivered >= sampling.min_new_tokens:
            return token, Finish.STOP
        return token, Finish.LENGTH if leg.delivered >= sampling.max_new_tokens else None

    def _end_of(self, leg: TimedLeg) -> int:
        """The token that ends a scripted answer: one that the request stops at."""
        stops = leg.leg.sampling.stop_token_ids
        return stops[-1] if stops else self._settings.eos_token
