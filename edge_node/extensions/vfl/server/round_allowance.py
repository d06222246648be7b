"""Limit of what one sensor can repeat while a round is open. Pure, without clock."""

from trainer.federation.server.membership import WINDOW


class RoundAllowance:
    """What each sensor has spent of its allowance: `most` rounds' worth of traffic,
    anew with every round.
    """

    def __init__(self, most: int):
        self._most = most
        self._since = 0.0
        self._spent: dict[str, float] = {}

    def renew(self, now: float) -> None:
        """A round is over."""
        self._since = now
        self._spent.clear()

    def spend(self, sensor: str, rounds: float, now: float) -> bool:
        """Take so many rounds' worth of traffic from a sensor's allowance;
        False if that much is not left.

        A round that stays open for long counts as a new one.
        """
        if now - self._since > WINDOW:
            self.renew(now)
        spent = self._spent.get(sensor, 0.0) + rounds
        if spent > self._most:
            return False
        self._spent[sensor] = spent
        return True
