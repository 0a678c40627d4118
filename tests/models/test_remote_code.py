"""Code that lies with a checkpoint runs if it was allowed to, and never else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_heads import write_release
from tiny_models import randomize, write_tiny

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.cli.main import main
from rollout.errors import ConfigError
from rollout.integrations.trl_colocate import LLM
from rollout.models.config.model import ModelConfig
from rollout.models.module_map import ModuleMap, replace_modules
from rollout.server.preflight import check

CPU = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32, "dtype": "float32"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
MODEL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({sentinel!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own-of-this-repository"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({sentinel!r}).touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A Llama that says to be a model of its own code, which leaves a file when it is imported."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    path, sentinel = tmp_path / "model", tmp_path / "was_run"
    write_tiny(path, "llama", tokenizer=True)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own-of-this-repository",
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling_own.py").write_text(MODEL.format(sentinel=str(sentinel)))
    yield path, sentinel
    for name in [n for n in sys.modules if n.startswith("transformers_modules")]:
        del sys.modules[name]


def own_tokenizer(path: Path, sentinel: Path) -> None:
    file = path / "tokenizer_config.json"
    said = json.loads(file.read_text())
    said |= {"tokenizer_class": "OwnTokenizer"}
    said["auto_map"] = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    file.write_text(json.dumps(said))
    (path / "tokenization_own.py").write_text(TOKENIZER.format(sentinel=str(sentinel)))


def test_no_code_of_a_checkpoint_runs_unless_it_is_trusted(remote, capsys):
    path, sentinel = remote
    for run in (
        lambda: Rollout(str(path), **CPU),
        lambda: Rollout(str(path), load_format="dummy", tensor_parallel_size=1, **CPU),
        lambda: check(EngineConfig(model=str(path), device="cpu")),
        lambda: ModelConfig.from_directory(path),
    ):
        with pytest.raises(ConfigError, match=r"OwnForCausalLM\), and is run with trust_remote_c"):
            run()
    assert main(["serve", str(path), "--device", "cpu", "--port", "0", "--grpc-port", "0"]) == 2
    assert "trust_remote_code=True" in capsys.readouterr().err
    assert not sentinel.exists()


def test_nor_does_the_code_of_a_tokenizer(remote, capsys):
    path, sentinel = remote
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (path / "config.json").write_text(json.dumps(config))
    own_tokenizer(path, sentinel)
    with pytest.raises(ConfigError, match=r"tokenizer of .*trust_remote_code=True"):
        Rollout(str(path), **CPU)
    assert not sentinel.exists()
    with Rollout(str(path), trust_remote_code=True, **CPU) as r:
        assert r.generate("The quick", GREEDY)[0].prompt_token_ids
    assert sentinel.exists()


def test_trusted_code_is_served_and_updated_like_transformers_own(remote):
    path, sentinel = remote
    llama = write_tiny(path.parent / "llama", "llama")
    with Rollout(str(path), trust_remote_code=True, **CPU) as r:
        assert sentinel.exists()
        tokens = r.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
        with torch.no_grad():
            for parameter in llama.parameters():
                parameter.mul_(0.75)
        r.update_weights(llama)
        assert r.check_weights(llama).equal
    with Rollout(str(path.parent / "llama"), **CPU) as r:
        assert r.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids == tokens


def test_code_that_cannot_be_imported_is_named(remote):
    path, _ = remote
    (path / "modeling_own.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ConfigError, match=r"its code modeling_own\.OwnForCausalLM cannot be"):
        Rollout(str(path), trust_remote_code=True, **CPU)


def test_trls_colocate_mode_says_that_code_is_trusted(remote):
    path, sentinel = remote
    with LLM(model=str(path), trust_remote_code=True, engine_config=CPU).rollout:
        assert sentinel.exists()


def test_fields_of_the_config_can_be_replaced(tmp_path):
    """Nested ones one by one; the file stays as it is."""
    write_tiny(tmp_path, "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    plain = ModelConfig.from_directory(tmp_path)
    other = ModelConfig.from_directory(
        tmp_path, overrides={"rope_parameters": {"rope_theta": 2e4}, "rms_norm_eps": 1e-3}
    )
    assert plain.layers[0].rope.theta == 5e5
    assert (other.layers[0].rope.theta, other.norm_eps) == (2e4, 1e-3)
    settings = {"hf_overrides": {"num_hidden_layers": 1}, **CPU}
    with Rollout(str(tmp_path), load_format="dummy", **settings) as r:
        assert not any("layers.1." in meta.name for meta in r.weight_info().tensors)
    with pytest.raises(ConfigError, match="hf_overrides must be a dict"):
        EngineConfig(model="x", hf_overrides=[1])


def test_a_config_without_architectures_is_read_by_its_model_type(tmp_path):
    write_tiny(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_directory(tmp_path).architecture == "Qwen3ForCausalLM"
    for kind, says in (
        ("foo", "unknown model_type 'foo', and no 'architectures'; name the architecture there"),
        ("qwen33", "unknown model_type 'qwen33', .* did you mean 'qwen3'"),
        ("clip", "field 'architectures' is missing"),  # no language model, but known
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        with pytest.raises(ConfigError, match=says):
            ModelConfig.from_directory(tmp_path)


REGISTERED = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class HouseConfig(LlamaConfig):
    model_type = "of-this-house"


class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig


AutoConfig.register("of-this-house", HouseConfig, exist_ok=True)
AutoModelForCausalLM.register(HouseConfig, HouseForCausalLM, exist_ok=True)
MODULE_MAP = {}
"""


def test_a_model_that_a_map_registers_with_transformers_is_served(tmp_path):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    llama = write_tiny(tmp_path / "llama", "llama")
    house = Path(shutil.copytree(tmp_path / "llama", tmp_path / "house"))
    config = json.loads((house / "config.json").read_text())
    config |= {"architectures": ["HouseForCausalLM"], "model_type": "of-this-house"}
    (house / "config.json").write_text(json.dumps(config))
    (tmp_path / "house.py").write_text(REGISTERED)
    with pytest.raises(ConfigError, match="has no such model"):
        Rollout(str(house), **CPU)
    try:
        with Rollout(str(house), module_map=str(tmp_path / "house.py"), **CPU) as r:
            tokens = r.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids
            assert r.check_weights(llama).equal
    finally:
        kinds = MODEL_FOR_CAUSAL_LM_MAPPING._extra_content
        for kind in [each for each in kinds if each.model_type == "of-this-house"]:
            del kinds[kind]
        CONFIG_MAPPING._extra_content.pop("of-this-house", None)
    with Rollout(str(tmp_path / "llama"), **CPU) as r:
        assert r.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids == tokens


WRONG = """
from torch import nn
class NoLength(nn.Module):
    def __init__(self, build): super().__init__()
class OtherForward(nn.Module):
    def __init__(self, build, max_len): super().__init__()
    def forward(self, input_ids): ...
MODULE_MAP = {
    "LlamaForCausalLM": NoLength, "Qwen3ForCausalLM": OtherForward,
    "transformers.models.llama.modeling_llama.LlamaMLP": NoLength,
}
"""


def test_a_class_with_another_signature_is_told_what_it_should_have(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "both.py").write_text("MODULE_MAP = {'a.b': 3}")
    for arch, match in (
        ("llama", r"NoLength\(build\) does not fit .* is built as NoLength\(build, max_len\)"),
        ("qwen3", r"OtherForward\.forward\(self, input_ids\) does not fit"),
    ):
        write_tiny(tmp_path / arch, arch)
        file = tmp_path / f"{arch}.py"
        keys = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        file.write_text(f"{WRONG}\nMODULE_MAP = {{'{keys[arch]}': MODULE_MAP['{keys[arch]}']}}\n")
        with pytest.raises(ConfigError, match=match):
            Rollout(str(tmp_path / arch), module_map=str(file), **CPU)
    for name, match in (
        ("nowhere.py", "cannot be imported"),
        ("both.py", r"MODULE_MAP\['a\.b'\] must be a class"),
        ("json", "has no dict MODULE_MAP"),
    ):
        where = str(tmp_path / name) if name.endswith(".py") else name
        with pytest.raises(ConfigError, match=match):
            Rollout(str(tmp_path / "llama"), module_map=where, **CPU)
    patch = tmp_path / "patch.py"
    patch.write_text("MODULE_MAP = {'transformers.models.llama.modeling_llama.LlamaMLP': 'a:B'}")
    with pytest.raises(ConfigError, match="LlamaForCausalLM runs natively"):
        Rollout(str(tmp_path / "llama"), module_map=str(patch), **CPU)


SQUARED = """
import torch
from transformers.models.phi.modeling_phi import PhiMLP


class SquaredMLP(PhiMLP):
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)).square())


MODULE_MAP = {"transformers.models.phi.modeling_phi.PhiMLP": SquaredMLP}
"""


def test_a_module_that_a_map_puts_in_the_place_of_another_computes_what_it_computes(tmp_path):
    """Before and after an update: transformers' own model with the same patch."""
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = PhiConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = PhiForCausalLM(config)
        randomize(model)
    model.eval().save_pretrained(tmp_path / "phi")
    (tmp_path / "squared.py").write_text(SQUARED)
    module_map, prompt = str(tmp_path / "squared.py"), [1, 2, 3, 4, 5]
    with Rollout(str(tmp_path / "phi"), module_map=module_map, **CPU) as r:
        started = r.generate(prompt, GREEDY)[0].outputs[0]
        r.update_weights((name, 0.9 * value) for name, value in model.state_dict().items())
        updated = r.generate(prompt, GREEDY)[0].outputs[0]

    def logprobs(given):
        ids = torch.tensor([[*prompt, *given.token_ids]])
        with torch.no_grad():
            rows = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return rows.gather(1, ids[0, len(prompt) :, None])[:, 0]

    plain = logprobs(started)
    replace_modules(model, ModuleMap.read(module_map).modules)
    torch.testing.assert_close(
        torch.tensor(started.logprobs.raw), logprobs(started), atol=1e-4, rtol=0
    )
    assert (plain - logprobs(started)).abs().max() > 0.1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    torch.testing.assert_close(
        torch.tensor(updated.logprobs.raw), logprobs(updated), atol=1e-4, rtol=0
    )


def test_importing_what_serves_initialises_no_gpu():
    code = (
        "import rollout.server.service, rollout.engine.worker.worker, torch; "
        "print(torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "False"


HOLDS_ALL = """
import torch
from torch import nn

SHAPES = {shapes}


class Glm4MoeForCausalLM(nn.Module):
    def __init__(self, build, max_len):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(torch.empty(shape)))

    def load_weights(self, items):
        parameters = dict(self.named_parameters())
        for name, tensor in items:
            parameters[name.replace(".", "_")].data.copy_(tensor)

    def forward(self, batch, kv):
        raise NotImplementedError


MODULE_MAP = {{"Glm4MoeForCausalLM": Glm4MoeForCausalLM}}
"""


def test_a_head_of_a_class_from_elsewhere_is_refused_by_start_and_check_alike(tmp_path):
    write_release(tmp_path, "glm4_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    (tmp_path / "holds_all.py").write_text(HOLDS_ALL.format(shapes=shapes))
    settings = {"module_map": str(tmp_path / "holds_all.py"), **CPU, "num_speculative_tokens": 2}
    told = []
    for act in (Rollout, lambda model, **given: check(EngineConfig(model=model, **given))):
        with pytest.raises(ConfigError, match="reads hidden states, which a model class from") as e:
            act(str(tmp_path), draft_component="mtp", **settings)
        told.append(str(e.value))
    assert told[0] == told[1]
