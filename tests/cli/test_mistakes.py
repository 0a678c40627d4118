"""Every user mistake is one line on stderr and exit status 2, without a traceback."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.cli.flags import engine_config, model_of, sampling_params, subparsers
from rollout.cli.main import make_parser
from rollout.cli.spellings import (
    COMMANDS,
    REFUSED,
    SAME,
    respelled,
)
from rollout.errors import ConfigError
from rollout.server.http.parsers import REASONING_PARSERS, TOOL_PARSERS
from rollout.server.listening import listen

Run = Callable[..., tuple[int, str, str]]
FREE_PORTS = ("--port", "0", "--grpc-port", "0")
CPU = ("--device", "cpu", "--num-threads", "1")


def refused(result: tuple[int, str, str], *words: str, name: str = "ConfigError") -> None:
    status, out, err = result
    assert status == 2, (out, err)
    assert err.startswith(f"rollout: {name}: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_unknown_flags_name_the_nearest(run: Run, tiny: Path) -> None:
    refused(run("serve", tiny, "--tensor-paralel-size", 2), "did you mean --tensor-parallel-size?")
    refused(run("serve", tiny, "--block-size", "big"), "--block-size")
    refused(run("launch"), "launch", "choose from")
    refused(run("genrate", tiny), "no 'genrate'; did you mean 'generate'?")
    refused(run(), "COMMAND")
    refused(run("serve", tiny, "--modle", tiny), "did you mean --model?")
    refused(run("serve", tiny, "--temprature", 1), "did you mean --temperature? It is a flag of `")
    refused(run("serve", tiny, "--quant", "int8"), "did you mean --quantization?")
    refused(run("serve", tiny, "--gpu-memory", 1), "did you mean --gpu-memory-utilization?")
    for far in ("--lora", "--temp", "--verbose", "--debug"):
        refused(run("serve", tiny, far, 1), f"unknown argument {far}; see `rollout serve --help`")
    refused(run("serve", tiny, "--stop", "x"), "--stop is a flag of `rollout generate`, not of")
    refused(run("generate", tiny, "--max-new-tokens", 3), "here it is --max-tokens")
    refused(run("serve", tiny, "again"), "'again' is one argument too many")


def test_what_a_server_is_given_beside_its_model_is_checked(run: Run, tiny: Path) -> None:
    for path in ("behind", "/behind/", "/"):
        refused(run("serve", tiny, "--root-path", path), "give a path as /rollout")
    modules = ("serve", tiny, "--max-adapters", 1, "--lora-modules")
    refused(run(*modules, "one"), "--lora-modules takes NAME=PATH, not 'one'")
    refused(run(*modules, "a=x", "a=y"), "--lora-modules a is given twice")
    refused(run("fleet", "--engine", "h:1", "--lora-modules", "a=x"), "this command starts")
    refused(run(*modules, "a=x", "b=y"), "2 adapters, and --max-adapters 1 has slots for no more")


def test_engines_of_a_fleet_are_named_once_and_by_their_addresses(run: Run) -> None:
    fleet = ("fleet", "--engine", "10.0.0.1:50051", "--engine")
    for address in ("http://h:50051", "h", "h:0", "h:70000", "[::1:5", "a b:5"):
        refused(run(*fleet, address), f"{address!r} is not host:port")
    refused(run(*fleet, "10.0.0.1:50051"), "10.0.0.1:50051 is given twice")
    refused(run(*fleet, "h:1,h:2"), "--engine h:1,h:2: give each its own, --engine A --engine B")
    refused(run(*fleet, "h:1", "h:2"), "Of several engines each has an --engine of its own")
    refused(run(*fleet, "[::1]:5", "--start-timeout", "0"), "--start-timeout must be")


def test_an_engine_at_loopback_beside_others_of_a_fleet_is_warned_of(
    run: Run, tmp_path: Path
) -> None:
    soon = ("--start-timeout", 0.5, "--port", 0, "--grpc-port", 0, "--record", tmp_path / "record")
    fleet = ("fleet", "--engine", "127.0.0.1:1", *soon)
    _, _, said = run(*fleet, "--engine", "10.0.0.1:50051")
    assert "--engine 127.0.0.1:1: other hosts' engines do not reach it there: give its" in said
    _, _, said = run(*fleet)
    assert "other hosts' engines" not in said


def test_a_fleet_has_engines_that_run_or_starts_them_on_ray(run: Run, tiny: Path) -> None:
    engine = ("fleet", "--engine", "10.0.0.1:50051")
    refused(run("fleet"), "Give --engine HOST:PORT")
    refused(run("fleet", "--ray"), "which MODEL?", "`rollout fleet MODEL`")
    refused(run(*engine, "--ray", "h:6379"), "--engine has engines that run, and --ray starts")
    refused(run(*engine, tiny), "add --ray", "`rollout serve MODEL --replicas N`")
    refused(run("fleet", tiny, "--replicas", 2), "add --ray")
    refused(run(*engine, "--replicas", 2, "--max-replicas", 3), "--replicas, --max-replicas: of")
    refused(run(*engine, "--num-threads", 2), "--num-threads: a setting of the engine")
    refused(run(*engine, "--follow", tiny), "is outside every --weight-dir; allow it with")
    ray = ("fleet", tiny, "--ray", "127.0.0.1:1")
    refused(run(*ray, "--executor", "inline"), "--executor inline: --ray goes with auto or ray")
    refused(run(*ray, "--ray-placement-group", "g"), "--ray-placement-group is of one engine's")
    refused(run(*ray, "--engine-token", "t"), "--engine-token is of engines that run already")
    refused(run(*ray, "--replicas", 0), "--replicas must be 1 or more")
    refused(run(*ray, "--engine-tls-ca", "ca.pem"), "--engine-tls-ca, --engine-tls-cert and")
    refused(run(*ray, *FREE_PORTS, *CPU), "a fleet on Ray")


def test_replicas_that_could_not_do_as_asked_are_refused(run: Run, tiny: Path) -> None:
    serve = ("serve", tiny, *FREE_PORTS, *CPU)
    below = ("--replicas", 3, "--quorum", 2, "--min-replicas", 1)
    refused(run(*serve, *below), "--min-replicas 1 is below --quorum 2")
    for given in ((), ("--replicas", 2, "--max-replicas", 4)):
        refused(run(*serve, *given, "--quorum", 3), "--quorum 3 is more than --replicas")
    refused(run(*serve, "--replicas", 2, "--quorum", 0), "--quorum must be 1 or more, got 0")
    for lease in ("nan", "inf", "0", "3601"):
        said = f"--lease must be above 0 and at most 3600 s, got {lease}"
        refused(run("fleet", "--engine", "127.0.0.1:1", "--lease", lease), said)
    refused(run(*serve, "--min-replicas", 2), "--replicas 1 is not between --min-replicas 2")


def test_flags_that_would_do_nothing_are_refused(run: Run, tiny: Path) -> None:
    """They say that something else was meant, such as ``--connect``."""
    serve = ("serve", tiny, *FREE_PORTS, *CPU)
    refused(run(*serve, "--replicas", 2, "--on-death", "serve"), "--on-death: of one engine")
    refused(run(*serve, "--open-host", "10.0.0.1"), "--open-host goes with --open-routes")
    secret = ("--token", "s", "--tls-ca", "ca.pem")
    refused(
        run("generate", tiny, "x", *secret), "--token, --tls-ca: of a service: give", "--connect"
    )
    refused(run("check", tiny, *secret), "--token, --tls-ca: of a service, whose weights --against")
    shapes = run("check", "127.0.0.1:1", "--against", tiny, "--print-shapes")
    refused(shapes, "--print-shapes is of a MODEL that is checked here")


def test_no_message_offers_what_was_given() -> None:
    """Every flag of every command and every spelling of others, at every command."""
    parser = make_parser()
    parsers = {p.prog.split()[-1]: p for p in subparsers(parser)}
    known = {name: set(parser._option_string_actions) for name, parser in parsers.items()}
    flags = {*set().union(*known.values()), *SAME, *REFUSED}
    for command in sorted(set(parsers) - {"plan", "fleet"}):
        theirs = set(SAME) if command in COMMANDS else set()
        for flag in sorted(flags - known[command] - theirs):
            with pytest.raises(ConfigError) as caught:
                parser.parse_known([command, "model", flag])
            assert f"did you mean {flag}?" not in str(caught.value)
            assert flag in str(caught.value)


def test_the_spellings_of_others_mean_ours() -> None:
    ours = {f for p in subparsers(make_parser()) for f in p._option_string_actions}
    assert not ours & {*SAME, *REFUSED}
    assert {words[0] for words in SAME.values()} <= ours
    for command in ("serve", "generate", "bench", "check"):
        words = "m -tp 2 -pp=3 --max-running-requests=8 --enforce-eager --dtype half "
        words += "--random-seed 7 --mem-fraction-static 0.8"
        args = make_parser().parse_known([command, *words.split(), "--context-length", "64"])
        config = engine_config(args, model="m")
        sizes = config.tensor_parallel_size, config.pipeline_parallel_size
        assert (*sizes, config.max_num_seqs, config.seed) == (2, 3, 8, 7)
        assert config.gpu_memory_utilization == 0.8
        assert (config.cuda_graphs, config.dtype, config.max_model_len) == ("off", "float16", 64)
    words = "serve --model m --api-key k --ssl-certfile c --ssl-keyfile=k --dtype=float"
    args = make_parser().parse_known(words.split())
    assert (model_of(args), args.token, args.tls_cert, args.tls_key) == ("m", "k", "c", "k")
    assert engine_config(args, model="m").dtype == "float32"
    args = make_parser().parse_known(["check", "m", "--enable-fp32-lm-head"])
    assert engine_config(args, model="m").head_dtype == "float32"
    args = make_parser().parse_known(["fleet", "--engine", "h:1", "--api-key", "k"])
    assert (args.engine, args.token) == (["h:1"], "k")
    assert respelled(["generate", "m", "--", "-tp"]) == ["generate", "m", "--", "-tp"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--tensor_parallel_size 2 --trust_remote_code", {"tensor_parallel_size": 2,
                                                          "trust_remote_code": True}),
        ("--gpu_memory_utilization=.5 --mem_fraction_static .5", {"gpu_memory_utilization": 0.5}),
        ("--generation-config vllm --kv-cache-dtype=fp8 --seed 3",
         {"seed": 3, "kv_cache_dtype": "fp8_per_token_head"}),
        ("--distributed-executor-backend mp", {"executor": "multiprocess"}),
        ("--distributed_executor_backend=ray", {"executor": "ray"}),
        ("--hf-overrides {\"rope_theta\":2}", {"hf_overrides": {"rope_theta": 2}}),
    ],
)  # fmt: skip
def test_underscores_and_values_of_others_mean_ours(theirs: str, ours: dict[str, object]) -> None:
    args = make_parser().parse_known(["serve", "m", *theirs.split()])
    config = engine_config(args, model="m").to_dict()
    assert {name: config[name] for name in ours} == ours
    args = make_parser().parse_known(["info", "h:1", "--tls_ca", "a_b"])
    assert args.tls_ca == "a_b"


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--max-tokens", "max_tokens"),
        ("--sampling-seed", "seed"),
        ("--allowed-token-id", "allowed_token_ids"),
        ("--min-version", "min_version"),
        ("--sampling-on-stale", "on_stale"),
        ("--adapter", "adapter"),
    ],
)
def test_none_is_a_value_where_the_help_says_so(run: Run, tiny: Path, flag: str, name: str) -> None:
    for word in ("none", "None"):
        args = make_parser().parse_known(["generate", "m", "hi", flag, word])
        assert getattr(sampling_params(args), name) is None
    refused(run("generate", tiny, "hi", "--max-tokens", "all"), "invalid int value: 'all'")


def test_choices_of_flags_may_be_in_capitals() -> None:
    args = make_parser().parse_known(["serve", "m", "--log-level", "INFO"])
    assert args.log_level == "info"


def test_a_prompt_that_looks_like_a_flag_or_a_model_is_told(run: Run, tiny: Path) -> None:
    for prompt in ("-5+3=", "-Hello"):
        remedy = f"a prompt that begins with - goes behind --, the last of all flags: -- {prompt!r}"
        refused(run("generate", "--connect", "h:1", prompt), f"unknown argument {prompt};", remedy)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    _, _, said = run("generate", "--connect", address, tiny, "hi")
    assert f"the directory {str(tiny)!r} is taken as a prompt (no MODEL is read" in said
    assert "'hi'" not in said


def test_a_sampling_parameter_without_a_flag_is_told_where_it_is(run: Run, tiny: Path) -> None:
    for flag in ("--logprobs", "--top-logprobs"):
        said = "--json shows those of the sampled tokens; in Python it is SamplingParams(logprobs="
        refused(run("generate", tiny, "hi", flag, 2), f"unknown argument {flag}; {said}")
    refused(run("generate", tiny, "hi", "--pooling", "mean"), "it is SamplingParams(pooling=...)")


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--cpu-offload-gb=1", "--staging"),
        ("--data-parallel-size", "rollout serve --replicas N"),
        ("--runner", "--task classify"),
        ("--enable-log-requests", "requests are not logged; --journal DIR"),
        ("--no-enable-log-requests", "requests are not logged"),
        ("--no-enable-chunked-prefill", "use --max-num-batched-tokens"),
        ("--attention-backend", "leave it out"),
        ("--compilation-config", "--cuda-graphs and --cuda-graph-size"),
        ("--structured-outputs-config", "grammars are xgrammar's"),
        ("--guided-decoding-backend", "grammars are xgrammar's"),
        ("--grammar-backend", "grammars are xgrammar's"),
        ("--schedule-policy", "first come is first served"),
        ("--skip-server-warmup", "leave it out"),
        ("--rope-scaling", 'use --hf-overrides {"rope_parameters": {...}}'),
        ("--max-total-tokens", "use --num-kv-blocks N, each of --block-size tokens"),
        ("--cuda-graph-max-bs", "use --cuda-graph-size, the batch sizes to capture"),
        ("--generation-config", "sampling defaults never apply silently"),
        ("--distributed-executor-backend=external_launcher", "use --executor"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(run: Run, tiny: Path, flag, ours) -> None:
    refused(run("serve", tiny, flag, "0.9"), flag.split("=")[0], ours)


def test_a_load_format_that_nobody_registered_is_refused_as_vllm_does(run: Run, tiny: Path) -> None:
    refusal = "Load format `nope` is not supported"
    refused(run("serve", tiny, "--load-format", "nope", *FREE_PORTS), refusal)
    refused(run("check", tiny, "--load-format", "nope"), refusal)
    refused(run("serve", tiny, "--hf-overrides", "[1]"), "is no JSON object")
    refused(run("serve", tiny, "--hf-overrides", "{"), "is no JSON")
    refused(run("serve", tiny, "--component", "draft"), "--component takes NAME=DIR")


def test_a_model_is_given_once_as_a_word_or_a_flag(run: Run, bare: Path) -> None:
    refused(run("serve"), "which MODEL?")
    refused(run("bench", bare, "--model", bare), "the model is given twice")
    status, out, _ = run("generate", "--model", bare, "--token-ids", "1,2", "--max-tokens", 2, *CPU)
    assert (status, len(out.split())) == (0, 2)


def test_flags_that_would_be_ignored_are_refused(run: Run, tiny: Path) -> None:
    refused(
        run("generate", "--connect", "h:1", "--dtype", "half", "hi"), "--dtype", "beside --connect"
    )
    refused(
        run("generate", "--connect", "h:1", "--model", tiny, "hi"), "--model", "beside --connect"
    )
    refused(run("check", "--against", tiny), f"rollout check --against {tiny} HOST:PORT")
    for half in ("--tls-key", "--tls-cert", "--tls-client-ca"):
        refused(run("serve", tiny, half, "x"), "TLS needs both --tls-cert and --tls-key")
    refused(run("check", tiny, "--all"), "--all goes with --against DIR")
    refused(run("info", "h:1", "--tls-cert", "x"), "--tls-ca")


def test_an_empty_token_is_no_token(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (("serve", tiny), ("info", "127.0.0.1:1")):
        refused(run(*command, "--token", " "), "--token is empty")
    refused(run("serve", tiny, "--control-token", ""), "the control token is empty")
    for flag in ("--engine-token", "--coordinator-token", "--record"):
        refused(run("fleet", "--engine", "127.0.0.1:1", flag, ""), f"{flag} is empty")
    monkeypatch.setenv("ROLLOUT_TOKEN", "")
    refused(run("serve", tiny), "ROLLOUT_TOKEN is set but empty")


def test_settings_out_of_range_are_named(run: Run, tiny: Path) -> None:
    refused(run("serve", tiny, "--port", 70000), "--port must be 0..65535")
    refused(run("serve", tiny, "--dtype", "int3"), "dtype must be one of")
    refused(run("serve", tiny, "--block-size", 0), "block_size must be a positive integer")
    refused(run("replay", "--journal", tiny, "--list", 0), "--list must be 1 or more")


def test_heads_that_do_not_divide_are_refused_before_any_rank(run: Run, tiny: Path) -> None:
    words = (
        "Total number of attention heads (4) must be divisible by tensor parallel size (3). "
        "Sizes that work: 1, 2, 4."
    )
    refused(run("check", tiny, "--tensor-parallel-size", 3), words)
    refused(run("generate", tiny, "hi", *CPU, "--tensor-parallel-size", 3), words)


def test_an_unknown_architecture_names_the_nearest(run: Run, tiny: Path, tmp_path: Path) -> None:
    model = broken_config(tiny, tmp_path, architectures=["Qwen3ForCausalLMs"])
    refused(run("check", model), "Qwen3ForCausalLMs", "Did you mean 'Qwen3ForCausalLM'")


def test_another_architecture_is_told_what_is_supported(
    run: Run, tiny: Path, tmp_path: Path
) -> None:
    model = broken_config(tiny, tmp_path, architectures=["MambaForCausalLM"])
    result = run("check", model)
    refused(result, "MambaForCausalLM", "Supported: ", "LlamaForCausalLM, ")
    assert "Did you mean" not in result[2]


def test_a_config_without_a_needed_field_names_it(run: Run, tiny: Path, tmp_path: Path) -> None:
    model = broken_config(tiny, tmp_path, num_attention_heads=None)
    refused(run("check", model), "num_attention_heads")


def test_missing_and_truncated_files_are_named(run: Run, tiny: Path, tmp_path: Path) -> None:
    refused(run("check", tmp_path / "nowhere" / "at" / "all"), "nowhere")
    model = Path(shutil.copytree(tiny, tmp_path / "cut"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(run("check", model), "model.safetensors")
    weights.unlink()
    refused(run("check", model), "safetensors")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    refused(run("check", adapter), "holds no config.json")
    (adapter / "adapter_config.json").write_text("{}")
    refused(run("check", adapter), "is an adapter", "--max-adapters 1 --lora-modules NAME=")


def test_weights_of_another_shape_are_a_mismatch(run: Run, tiny: Path, tmp_path: Path) -> None:
    model = broken_config(tiny, tmp_path, intermediate_size=64)
    refused(
        run("check", model), "gate_proj.weight is [128, 64], not [64, 64]", name="WeightMismatch"
    )


def test_a_host_name_that_means_loopback_here_is_warned_of(caplog) -> None:
    """As Debian's 127.0.1.1, which is each machine's own name."""
    listen("127.1", 0, "HTTP").close()
    assert "127.1, for HTTP, is 127.0.0.1 on this machine, which no other host" in caplog.text
    caplog.clear()
    for host in ("127.0.0.1", "localhost", "0.0.0.0"):
        listen(host, 0, "HTTP").close()
    assert not caplog.records


@pytest.mark.parametrize("host", ["nobody.invalid", "192.0.2.1"])
def test_a_host_that_is_none_of_this_machines_is_not_taken_for_a_busy_port(
    run: Run, tiny: Path, host: str
) -> None:
    command = ("serve", tiny, *CPU, "--host", host, "--token", "t", "--insecure", "--port", 0)
    refused(run(*command), f"cannot listen on {host}:0 for HTTP", "give an address of this machine")


def test_a_busy_port_is_refused_before_the_model_is_read(run: Run, tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flag in ("--port", "--grpc-port"):
            other = "--grpc-port" if flag == "--port" else "--port"
            result = run("serve", tiny, *CPU, flag, port, other, 0)
            door = "HTTP" if flag == "--port" else "gRPC"
            refused(result, f"cannot listen on 127.0.0.1:{port} for {door}", "in use")


def test_an_open_host_needs_a_token(run: Run, tiny: Path) -> None:
    address = run("serve", tiny, *CPU, "--host", "localhost:8000")
    refused(address, "the host 'localhost:8000' has a port in it: give 'localhost' and the port")
    door = ("serve", tiny, *CPU, "--host", "0.0.0.0", "--port", 0)
    refused(run(*door), "give a token (--token, token=)")
    refused(run(*door, "--token", "t"), "--tls-cert", "--insecure")
    opened = ("--open-routes", "/health", "--open-port", 0, "--open-host")
    refused(run("serve", tiny, *opened, "10.0.0.1"), "--insecure")
    refused(run("serve", tiny, *opened, "0.0.0.0"), "open routes cannot listen on 0.0.0.0")
    refused(run("serve", tiny, "--open-routes", "/health"), "--open-port")
    refused(run("serve", tiny, "--max-body-bytes", 0), "max_body_bytes")


def test_a_wrong_number_of_layers_is_one_line(run: Run, tiny: Path, tmp_path: Path) -> None:
    model = broken_config(tiny, tmp_path, num_hidden_layers=3)
    refused(run("generate", model, "hi", *CPU), "num_hidden_layers is 3", "layer_types")


def test_check_says_of_a_tokenizer_what_serving_would(
    run: Run, tiny: Path, bare: Path, tmp_path: Path
) -> None:
    told = {model: run("check", model, "--device", "cpu")[1] for model in (tiny, bare)}
    assert re.search(r"^tokenizer +\d+ tokens, with a chat template$", told[tiny], re.M)
    assert re.search(r"^tokenizer +none: requests bring token ids$", told[bare], re.M)
    refused(run("check", tiny, "--tokenizer", "/nope"), "'/nope' is no directory here")
    refused(run("check", tiny, "--chat-template", "nope.jinja"), "nope.jinja cannot be read")
    model = Path(shutil.copytree(tiny, tmp_path / "cut"))
    (model / "tokenizer.json").write_text("{")
    refused(run("check", model), "tokenizer", "skip_tokenizer_init=True")


def test_a_path_that_is_nowhere_is_one_short_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    result = run("check", "m/nope")
    refused(result, "m/nope: no such directory, not in the hub cache")
    assert len(result[2]) < 200


def test_an_unreachable_server_is_named(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    refused(run("info", address), address, name="EngineClosed")
    refused(run("generate", "--connect", address, "hi"), address, name="EngineClosed")
    for address in ("nonsense", "http://127.0.0.1:50051"):
        refused(run("info", address), "host:port")


def test_what_would_be_ignored_is_refused(run: Run, tiny: Path) -> None:
    words = ("--dtype, --num-threads", "leave it out beside --connect")
    ask = ("generate", "--connect", "127.0.0.1:9", "hi")
    refused(run(*ask, "--dtype", "float32", "--num-threads", 1), *words)
    refused(run(*ask, "--seed", 1), "leave it out beside --connect, or give --sampling-seed, of")
    against = ("check", "--against", tiny, "127.0.0.1:9")
    refused(run(*against, "--tensor-parallel-size", 2), "leave it out beside --against")
    for command in (("check", tiny), ("generate", tiny, "hi")):
        result = run(*command, "--device", "cpu", "--cuda-graphs", "on")
        refused(result, "cuda_graphs='on'", "on cpu", "use 'auto' or 'off'")


def test_a_cache_beyond_the_free_memory_is_refused(run: Run, tiny: Path) -> None:
    for flag, value in (("--kv-cache-bytes", 1 << 50), ("--num-kv-blocks", 1 << 40)):
        for command in (("check", tiny), ("generate", tiny, "hi", *CPU)):
            name = flag[2:].replace("-", "_")
            refused(run(*command, flag, value), f"{name}={value} is a KV cache of", "lower it")


def test_slots_for_adapters_beyond_the_free_memory_are_refused(run: Run, tiny: Path) -> None:
    many = ("--max-adapters", 10**12)
    refused(run("check", tiny, *many), "memory for the slots of max_adapters=1000", "lower")
    refused(run("generate", tiny, "hi", *many, *CPU), "no memory for the slots of max_adapters=")


def test_bad_prompts_and_parameters_are_named(run: Run, tiny: Path, bare: Path) -> None:
    result = run("generate", bare, "hi", *CPU)
    refused(result, "needs a tokenizer, but", "has none", name="InvalidRequest")
    result = run("generate", tiny, "hi", "--skip-tokenizer-init", *CPU)
    refused(result, "started with skip_tokenizer_init=True", "without", name="InvalidRequest")
    refused(run("generate", bare, "--token-ids", "1,x", *CPU), "--token-ids")
    result = run("generate", bare, "--token-ids", "1,99999", *CPU)
    refused(result, "outside the vocabulary", name="InvalidRequest")
    refused(run("generate", bare, *CPU), "needs a prompt", "for which", "is taken")
    refused(run("generate"), "MODEL")
    result = run("generate", bare, "--token-ids", "1", "--n", 2, "--temperature", 0, *CPU)
    refused(result, "n must be 1 when using greedy", name="InvalidRequest")
    long = ",".join(["1"] * 600)
    refused(run("generate", bare, "--token-ids", long, *CPU), "512", name="PromptTooLong")


def test_too_little_memory_for_one_sequence_is_refused(run: Run, bare: Path) -> None:
    result = run("check", bare, "--kv-cache-bytes", 1, "--max-model-len", 128)
    refused(result, "too little memory for one sequence")


def test_the_process_itself_exits_with_2_and_one_line(bare: Path) -> None:
    command = [sys.executable, "-m", "rollout", "serve", str(bare), "--tensor-parallel-size", "3"]
    done = subprocess.run(
        [*command, "--port", "0", "--grpc-port", "0"],
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    refused((done.returncode, done.stdout, done.stderr), "attention heads (4)")
    assert done.stdout == ""


def broken_config(model: Path, folder: Path, **changes: object) -> Path:
    """A copy whose config.json has these values; None removes the field."""
    copy = Path(shutil.copytree(model, folder / "broken"))
    file = copy / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return copy


@pytest.mark.parametrize(
    "command", [(), ("serve",), ("generate",), ("check",), ("info",), ("bench",), ("plan",)]
)
def test_help_reads_without_an_engine(
    command: tuple[str, ...], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*command, "--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: rollout")
    assert "None" not in out


def test_the_help_and_the_docs_name_every_parser_of_answers(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("serve", "--help")
    out = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
    for name in (*TOOL_PARSERS, *REASONING_PARSERS):
        assert re.search(rf"\b{name}\b", out), name
        assert f"`{name}`" in page
