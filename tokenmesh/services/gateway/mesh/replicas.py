"""Replicas: one process of a service, where the queue group has chosen badly."""

from tokenmesh.shared import subjects
from tokenmesh.shared.membership import Members


class Replicas:
    """Of processes that stand still some still count as alive; the one heard last surely is."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def freshest(self, subject: str) -> str:
        """The subject of that process alone; `subject` itself while nobody is known."""
        found = [
            each
            for each in self._members.service(subjects.service_of(subject))
            if not each.beat.draining
        ]
        if not found:
            return subject
        last = max(found, key=lambda each: each.last_seen)
        return subjects.replica(subject, last.beat.instance_id)
