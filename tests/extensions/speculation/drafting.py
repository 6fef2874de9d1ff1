"""Drafts for an executor of tests, by any drafter."""

from oscine.executor.drafts import MakeDrafts
from oscine.extensions.speculation.drafter import DeviceDrafter, HostDrafter
from oscine.extensions.speculation.head_drafts import HeadDrafts
from oscine.extensions.speculation.host_drafts import HostDrafts


def on_host(drafter: HostDrafter) -> MakeDrafts:
    return lambda parts: HostDrafts(drafter, parts)


def on_device(drafter: DeviceDrafter, most: int) -> MakeDrafts:
    return lambda parts: HeadDrafts(drafter, most, parts)
