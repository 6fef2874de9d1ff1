"""Parts of an executor that extensions make, as "module:name", and the option that wants each."""

from typing import Any, NamedTuple

from oscine.system.extensions import is_there, lacking, load


class Place(NamedTuple):
    asked: str  # the option that wants the part
    name: str


DRAFTING = Place("--speculative-config", "oscine.extensions.speculation.start:drafting_of")
LOCKSTEP = Place("--enable-expert-parallel", "oscine.extensions.parallel.start.share:open_lockstep")
RANK_PROCESSES = Place("--tensor-parallel-size", "oscine.extensions.parallel.processes:RankProcesses")
LOAD_RANKS = Place("--tensor-parallel-size", "oscine.extensions.parallel.start.ranks:load_ranks")
STORE = Place("--kv-offload-bytes", "oscine.extensions.offload.start:store_of")
FAKE_STORE = Place("--kv-offload-bytes", "oscine.extensions.offload.start:fake_store_of")
TRANSFERS = Place("moving pages between engines", "oscine.extensions.disaggregation.start:transfers_of")
FAKE_TRANSFERS = Place("moving pages between engines", "oscine.extensions.disaggregation.start:fake_transfers_of")


def part(place: Place) -> Any:
    """Raises ValueError if its extension is missing."""
    if not is_there(place.name):
        raise ValueError(f"{place.asked} {lacking(place.name)}")
    return load(place.name)
