"""Parts of an engine and its executor that extensions make, as "module:name", and the option that wants each."""

from oscine.settings.config import FOUND, NO_SCALES, EngineOptions
from oscine.system.extensions import Place, check_part

DRAFTING = Place("--speculative-config", "oscine.extensions.speculation.start:drafting_of")
HEAD_IDENTITY = Place("--speculative-config", "oscine.extensions.speculation.eagle.find:identity_of_head")
LOCKSTEP = Place("--enable-expert-parallel", "oscine.extensions.parallel.start.share:open_lockstep")
GROUP = Place("--enable-expert-parallel", "oscine.extensions.parallel.together:EngineGroup")
RANK_PROCESSES = Place("--tensor-parallel-size", "oscine.extensions.parallel.processes:RankProcesses")
LOAD_RANKS = Place("--tensor-parallel-size", "oscine.extensions.parallel.start.ranks:load_ranks")
EXPERTS_ON_HOST = Place("--experts-on-host", "oscine.extensions.experts_on_host.layers:HostLayers")
STORE = Place("--kv-offload-bytes", "oscine.extensions.offload.start:store_of")
FAKE_STORE = Place("--kv-offload-bytes", "oscine.extensions.offload.start:fake_store_of")
KV_SCALES = Place("--kv-scales", "oscine.extensions.calibration.scales:find_scales")
KV_EVENTS = Place("--kv-events-config", "oscine.extensions.kv_events.publisher:KVEvents")
TRANSFERS = Place("moving pages between engines", "oscine.extensions.disaggregation.start:transfers_of")
SLEEPER = Place("--enable-sleep-mode", "oscine.extensions.models.sleep.start:sleeper_of")
FAKE_SLEEPER = Place("--enable-sleep-mode", "oscine.extensions.models.sleep.fake:fake_sleeper_of")
FOLLOWER = Place("moving pages between engines", "oscine.extensions.disaggregation.start:follower_of")
FAKE_TRANSFERS = Place("moving pages between engines", "oscine.extensions.disaggregation.start:fake_transfers_of")


def check_parts(options: EngineOptions) -> None:
    """Raises ValueError if an option wants a part whose extension is missing."""
    wanted = {
        DRAFTING: options.speculation.is_on,
        LOAD_RANKS: options.model.tensor_parallel_size > 1,
        EXPERTS_ON_HOST: options.model.experts_on_host not in (None, "0"),
        STORE: options.cache.kv_offload_bytes,
        KV_SCALES: options.cache.kv_scales not in (FOUND, NO_SCALES),
        KV_EVENTS: options.peers.kv_events,
        TRANSFERS: options.peers.kv_transfer,
        SLEEPER: options.sleep_mode,
    }
    for place in filter(wanted.get, wanted):
        check_part(place)
