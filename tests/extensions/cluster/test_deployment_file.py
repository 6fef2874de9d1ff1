"""The deployment file of a cluster: its meaning, and each error with its line, its key and the rule."""

from pathlib import Path

import pytest

from oscine.cli.error import CommandError
from oscine.extensions.cluster.cli import deployment_file
from oscine.extensions.cluster.cli.deployment_file import read_deployment
from oscine.extensions.replicas.spec.deployment import (
    Deployment,
    PrefillLimits,
    QueueLimits,
    Replicas,
    RoleSpec,
    ServiceLevels,
)
from oscine.settings.config import NANO

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "cluster").glob("*.yaml"))
WHOLE = """
ray: 10.0.0.1:6379
prefix-seed: 5eed5eed
ingress:
  host: 0.0.0.0
  port: 9000
  replicas: 2
  resource: front
  max_connections: 100
  no-playground: true
router: {replicas: 1, resource: inner}
models:
  - name: [first, second]
    profile: max_throughput
    engine:
      max-num-seqs: 32
      kv_cache_bytes: 1000000
    prefill: {cpus: 0.5, engine: {max-num-seqs: 4}}
    decode:
      replicas: {min: 0, max: 3}
      gpus: 1
      surge: false
    remote-prefill: {min-tokens: 100, timeout_s: 3}
    service-levels: {ttft-s: 1, itl-s: 0.02}
    scaling: {up-cooldown-s: 1, down-cooldown-s: 30}
    queue: {max-requests: 10, max-wait-s: 5}
    migration-retries: 2
    start-timeout-s: 60
  - name: other
    model: FOLDER
"""


def read(folder: Path, text: str) -> Deployment:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return read_deployment(file)


def test_all_that_a_file_can_say(tmp_path: Path, model_folder: Path) -> None:
    deployment = read(tmp_path, WHOLE.replace("FOLDER", str(model_folder)))
    assert (deployment.ray, deployment.prefix_seed) == ("10.0.0.1:6379", "5eed5eed")
    assert deployment.ingress_replicas == 2
    assert (deployment.ingress_resource, deployment.router_resource) == ("front", "inner")
    server = deployment.server
    assert (server.host, server.port, server.max_connections, server.playground) == ("0.0.0.0", 9000, 100, False)
    first, other = deployment.models
    assert first.names == ("first", "second")
    prefill, decode = first.roles
    assert (prefill.role, prefill.cpus, prefill.engine.scheduler.max_num_seqs) == ("prefill", 0.5, 4)
    assert (decode.role, decode.replicas, decode.gpus, decode.surge) == ("decode", Replicas(0, 3), 1.0, False)
    assert (decode.engine.scheduler.max_num_seqs, decode.engine.cache.kv_cache_bytes) == (32, 1_000_000)
    assert decode.engine.scheduler.stream_interval == 10  # of the profile
    assert (first.prefill, first.levels) == (PrefillLimits(100, 3.0), ServiceLevels(1.0, 0.02))
    assert (first.queue, first.migration_retries, first.start_timeout_s) == (QueueLimits(10, 5.0), 2, 60.0)
    assert [role.role for role in other.roles] == ["aggregated"]
    assert other.serving.engine.model.model == str(model_folder)


def test_the_folder_of_a_head_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "head").mkdir()
    for named, expected in (("head", str(tmp_path / "head")), ("nvidia/head", "nvidia/head")):
        text = "models: [{name: nano, engine: {speculative-config: {method: eagle3, model: HEAD}}}]"
        speculation = read(tmp_path, text.replace("HEAD", named)).models[0].serving.engine.speculation
        assert (speculation.method, speculation.model) == ("eagle3", expected)


def test_a_name_is_enough_for_the_embedded_model(tmp_path: Path) -> None:
    deployment = read(tmp_path, "models: [{name: nano}]")
    assert deployment.models[0].serving.engine.model.model == NANO
    assert deployment.models[0].serving.replicas == Replicas(1, 1)


def test_roles_may_differ_in_their_ranks(tmp_path: Path) -> None:
    """The size stands beside the GPUs, or among the options of the engine."""
    text = MODEL + "    engine: {tp-size: 2}\n    prefill: {gpus: 4, tensor-parallel-size: 4}\n    decode: {gpus: 2}\n"
    (model,) = read(tmp_path, text).models
    assert [(role.gpus, role.engine.model.tensor_parallel_size) for role in model.roles] == [(4.0, 4), (2.0, 2)]


def test_a_replica_has_a_rank_on_each_of_its_gpus_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    def ranks(text: str) -> list[int]:
        (model,) = read(tmp_path, MODEL + text).models
        return [role.engine.model.tensor_parallel_size for role in model.roles]

    assert ranks("    prefill: {gpus: 1}\n    decode: {gpus: 2}\n") == [1, 2]
    assert ranks("    aggregated: {gpus: 0.5}\n") == [1]
    assert ranks("    aggregated: {gpus: 2, tensor-parallel-size: 1}\n") == [1]
    assert ranks("    engine: {tp: 1}\n    aggregated: {gpus: 4}\n") == [1]


def test_a_replica_may_have_several_engines(tmp_path: Path) -> None:
    def role(text: str) -> RoleSpec:
        return read(tmp_path, MODEL + f"    aggregated: {{{text}}}\n").models[0].serving

    shared = role("gpus: 4, data-parallel-size: 4, enable-expert-parallel: true")
    assert (shared.gpus, shared.data_parallel_size, shared.enable_expert_parallel) == (4.0, 4, True)
    assert [one.model.tensor_parallel_size for one in shared.engines] == [1] * 4
    ranks = role("gpus: 4, tensor-parallel-size: 2, data-parallel-size: 2")
    assert [one.model.device for one in ranks.engines] == ["cuda:0,cuda:1", "cuda:2,cuda:3"]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda path: path.name)
def test_the_examples(file: Path, monkeypatch: pytest.MonkeyPatch, model_folder: Path) -> None:
    monkeypatch.setattr(deployment_file, "tokenizer_folder", lambda engine: model_folder)  # not from the hub
    assert read_deployment(file).models


MODEL = "models:\n  - name: nano\n"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("models:\n  - name: a\nworkers: 3\n", 3, ["unknown key 'workers'"]),
        (MODEL + "    aggregated:\n      gpus: 3\n      data-parallel-size: 2\n", 4, ["gpus must be", "1 x 2"]),
        (MODEL + "    aggregated:\n      enable-expert-parallel: true\n", 4, ["data-parallel-size above 1"]),
        (
            MODEL + "    prefill: {}\n    decode:\n      gpus: 2\n      data-parallel-size: 2\n",
            6,
            ["must be 1 for the role decode"],
        ),
        (MODEL + "    replicas: 2\n", 3, ["models[0]", "unknown key 'replicas'"]),
        (MODEL + "    name: b\n", 3, ["models[0].name", "twice"]),
        ("ingress: {port: 8000}\n", 1, ["models is missing"]),
        ("models: []\n", 1, ["models must be one or more"]),
        ("models: 3\n", 1, ["models must be a list"]),
        ("models:\n  - model: x\n", 2, ["name is missing"]),
        ("- a\n", 1, ["must be a mapping"]),
        ("a: [\n", 2, []),
        ("models:\n  - name: a\x00\n", 2, ["unacceptable character"]),
        ("models:\n  - name: 2024-99-99\n", 2, ["month"]),
        ("models:\n  - name: !thing a\n", 2, ["!thing"]),
        (MODEL + "    profile: fast\n", 3, ["profile must be low_latency or max_throughput"]),
        (MODEL + "    prefill: {}\n", 3, ["prefill needs decode"]),
        (MODEL + "    decode: {}\n", 3, ["decode needs prefill"]),
        (MODEL + "    prefill: {}\n    decode: {}\n    aggregated: {}\n", 5, ["aggregated excludes"]),
        (MODEL + "    remote-prefill: {}\n", 3, ["remote-prefill needs"]),
        (MODEL + "    aggregated:\n      replicas:\n        min: 3\n        max: 2\n", 5, ["min", "at most max (2)"]),
        (MODEL + "    aggregated:\n      replicas: 0\n", 4, ["replicas must be at least 1"]),
        (MODEL + "    aggregated:\n      replicas: two\n", 4, ["a whole number", "'two'"]),
        (MODEL + "    aggregated:\n      tensor-parallel-size: 0\n", 4, ["tensor-parallel-size must be at least 1"]),
        (
            MODEL + "    aggregated:\n      gpus: 1\n      tensor-parallel-size: 2\n",
            4,
            ["gpus must be the tensor-parallel-size (2)"],
        ),
        (MODEL + "    aggregated:\n      gpus: 1.5\n", 4, ["gpus must be whole"]),
        (MODEL + "    aggregated:\n      cpus: 0\n", 4, ["cpus must be positive"]),
        (MODEL + "    service-levels:\n      ttft-s: yes\n", 4, ["ttft-s must be a number", "true"]),
        (
            MODEL + "    engine:\n      max-num-seqs: many\n",
            4,
            ["models[0].engine: max-num-seqs must be a whole number, not 'many'"],
        ),
        (MODEL + "    engine:\n      max-num-seq: 3\n", 4, ["unknown key 'max-num-seq'; did you mean max-num-seqs?"]),
        (MODEL + "    engine:\n      api-key: x\n", 4, ["api-key is no option of an engine"]),
        (MODEL + "    engine:\n      enable-expert-parallel: true\n", 4, ["is no option of an engine"]),
        (MODEL + "    engine:\n      enable_attention_dp: true\n", 4, ["is no option of an engine"]),
        (
            MODEL + "    engine:\n      page-size: 48\n",
            4,
            ["models[0].engine: page-size must be 16, 32, 64 or 128, not 48"],
        ),
        (
            MODEL + "    engine: {max-num-seqs: 2000, max-num-batched-tokens: 1024}\n",
            3,
            ["--max-num-batched-tokens", "--max-num-seqs"],
        ),
        (
            MODEL + "    engine:\n      device: cpu\n      max_batch_size: 2000\n      max_num_tokens: 99\n",
            6,
            ["at least --max-num-seqs (2000)"],
        ),
        (
            MODEL + "    engine:\n      kv-cache-bytes: 1G\n      kv-cache-config: {free-gpu-memory-fraction: 0.5}\n",
            4,
            ["models[0].engine: --kv-cache-bytes and --kv-cache-free-gpu-memory-fraction exclude each other"],
        ),
        (MODEL + "    model: /no/such/folder\n", 3, ["no such folder"]),
        (MODEL + "  - name: [x, nano]\n", 3, ["there is a model 'nano' already"]),
        (MODEL + "  - name: a/b\n  - name: a-b\n", 4, ["'a-b' is too much like"]),
        ("ingress: {max-num-seqs: 3}\n" + MODEL, 1, ["max-num-seqs is no option of an ingress"]),
        ("ingress:\n  port: 99999\n" + MODEL, 2, ["ingress: port must be between 0 and 65535, not 99999"]),
        ("ingress:\n  port: 0\n  port_file: port\n" + MODEL, 3, ["ingress: --port-file is for `oscine serve`"]),
        ("ingress:\n  replicas: 2\n  port: 0\n" + MODEL, 3, ["port must be given"]),
        ("router:\n  replicas: 2\n" + MODEL, 2, ["replicas must be 1", "the whole queue"]),
        ("router: {policy: random}\n" + MODEL, 1, ["unknown key 'policy'"]),
        ("ingress:\n  api-keys-file: /no/keys.yaml\n" + MODEL, 2, ["/no/keys.yaml"]),
        ("prefix-seed: xyz\n" + MODEL, 1, ["prefix-seed must be hexadecimal"]),
        ("prefix-seed: 1234\n" + MODEL, 1, ["prefix-seed must be text"]),
    ],
)
def test_an_error_names_its_line(tmp_path: Path, text: str, line: int, words: list[str]) -> None:
    with pytest.raises(CommandError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/cluster.yaml:{line}: "), message
    assert all(word in message for word in words), message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="No such file"):
        read_deployment(tmp_path / "none.yaml")
