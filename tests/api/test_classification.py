"""Sequence classifiers and reward models: transformers' logits, and weights like any others."""

import numpy as np
import pytest
import torch
from api.conftest import ENGINE
from tiny_models import write_tiny

from rollout import ConfigError, InvalidRequest, Rollout, SamplingParams, WeightMismatch
from rollout.api.diagnosing.diagnosis import diagnose
from rollout.generation import Labels

pytestmark = pytest.mark.usefixtures("forked_ranks")

ODD = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}
ODD |= {"intermediate_size": 50, "vocab_size": 301}
LONG = [(7 * n) % 290 + 3 for n in range(90)]
PROMPTS = [[1, 2, 3], LONG, [9], LONG[:64], [*LONG[:40], 5, 6], LONG]
NAMES = ("dull", "fair", "keen", "odd", "vast")


def wanted(model, prompts=PROMPTS):
    """Row by row, so that nothing is padded: [labels] each."""
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].numpy() for ids in prompts]


def check(outputs, model, version):
    for output, ids, row in zip(outputs, PROMPTS, wanted(model), strict=True):
        assert output.prompt_token_ids == ids
        np.testing.assert_allclose(output.logits, row, rtol=0, atol=1e-4)
        assert output.logits.dtype == np.float32
        assert (output.weight_version, output.is_mixed) == (version, False)
        assert output.kv_spans[-1].stop == len(ids)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """An engine of five labels, a client of it, and transformers' model of the same weights."""
    path = tmp_path_factory.mktemp("classifier")
    model = write_tiny(path, labels=5, tokenizer=True, **ODD, id2label=dict(enumerate(NAMES)))
    with Rollout(str(path), **ENGINE) as engine, Rollout.connect(engine.address) as client:
        yield engine, client, model


def test_a_classifier_gives_transformers_logits_in_batches_and_through_the_prefix_cache(classifier):
    engine, client, model = classifier
    first = engine.classify(PROMPTS)
    check(first, model, 0)
    again = engine.classify(PROMPTS)
    check(again, model, 0)
    assert again[1].num_cached_tokens == 64  # whole blocks, and still the last token was computed
    check(client.classify(PROMPTS), model, 0)
    probs = torch.tensor(first[1].logits).softmax(-1)
    np.testing.assert_allclose(first[1].probs, probs, atol=1e-6)
    assert first[1].label == NAMES[int(probs.argmax())]
    assert first[1].labels == client.classify([[1]])[0].labels == Labels(names=NAMES)
    [text] = client.classify("Hello")
    assert np.array_equal(text.logits, engine.classify([client.tokenize("Hello")])[0].logits)


def test_padding_at_the_end_is_passed_over_as_by_transformers(classifier):
    engine, client, model = classifier
    pad = model.config.pad_token_id
    prompts = [[5, 6, 7, pad, pad], [pad, 5, pad], [pad, pad], [5, 6, pad]]
    for face in (engine, client):
        for output, row, ids in zip(
            face.classify(prompts), wanted(model, prompts), prompts, strict=True
        ):
            np.testing.assert_allclose(output.logits, row, rtol=0, atol=1e-4)
            assert output.prompt_token_ids == ids
    assert len(engine.classify([prompts[0]], pooling="all")[0].logits) == 5


def test_logits_of_every_token_are_a_value_models(classifier):
    engine, client, model = classifier
    with torch.no_grad():
        each = model.score(model.model(torch.tensor([LONG])).last_hidden_state[0]).numpy()
    for face in (engine, client):
        [output] = face.classify([LONG], pooling="all")
        np.testing.assert_allclose(output.logits, each, rtol=0, atol=1e-4)
        assert output.probs.shape == (len(LONG), len(NAMES))
        assert output.label == NAMES[int(each[-1].argmax())]
    [one] = engine.classify([[9]], pooling="all")
    assert one.logits.shape == (1, len(NAMES))


def test_each_head_refuses_what_the_other_is_for_and_says_so(classifier, engine):
    for face in classifier[:2]:
        for ask in (
            lambda f: f.generate([[1]]),
            lambda f: f.embed([[1]]),
            lambda f: f.score([[1, 2]]),
            lambda f: f.generate(
                [[1]], SamplingParams(max_tokens=2, hidden_state=True, pooling="classify")
            ),
        ):
            with pytest.raises(InvalidRequest, match="no LM head: ask it by classify"):
                ask(face)
        with pytest.raises(ConfigError, match="diagnose compares language models"):
            diagnose(face, classifier[2])
        with pytest.raises(InvalidRequest, match="one label; this one has 5"):
            _ = face.classify([[1]])[0].reward
        with pytest.raises(InvalidRequest, match="one of last, all"):
            face.classify([[1]], pooling="mean")
        check(face.classify(PROMPTS), classifier[2], 0)  # and nobody died of it
    with pytest.raises(InvalidRequest, match=r"no score head: .*ForSequenceClassification"):
        engine.classify([[1]])


def test_probabilities_follow_vllms_rule():
    logits = np.array([[1.0, -2.0, 800.0], [-800.0, 0.0, 0.5]], np.float32)
    rows = torch.tensor(logits)
    names = ("a", "b", "c")
    for problem, rule in (
        ("", rows.softmax(-1)),
        ("single_label_classification", rows.softmax(-1)),
        ("multi_label_classification", rows.sigmoid()),
        ("regression", rows),
    ):
        found = Labels(names=names, problem_type=problem).probabilities(logits)
        np.testing.assert_allclose(found, rule, rtol=1e-5, atol=1e-30)
    one = Labels(names=("a",)).probabilities(logits[:, :1])
    np.testing.assert_allclose(one, rows[:, :1].sigmoid(), rtol=1e-5)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_reward_model_is_updated_like_any_other_to_the_bits_of_a_fresh_start(tmp_path, size):
    shape = {} if size > 1 else ODD
    old = write_tiny(tmp_path / "old", labels=1, **shape)
    new = write_tiny(tmp_path / "new", labels=1, seed=1, **shape)
    settings = {**ENGINE, "tensor_parallel_size": size}
    with Rollout(str(tmp_path / "new"), **settings) as fresh:
        rewards = fresh.classify(PROMPTS)
        check(rewards, new, 0)
    with Rollout(str(tmp_path / "old"), **settings) as engine:
        check(engine.classify(PROMPTS), old, 0)
        with pytest.raises(WeightMismatch, match=r"score\.weight"):
            engine.update_weights({k: v for k, v in new.state_dict().items() if "score" not in k})
        receipt = engine.update_weights(new, encoding="delta")  # the trainer's module, whole
        assert receipt.num_tensors == len(new.state_dict())
        found = engine.classify(PROMPTS)
        check(found, new, 1)
        for mine, theirs in zip(found, rewards, strict=True):
            assert mine.reward == theirs.reward == mine.logits[0]
        with torch.no_grad():
            new.score.weight[0, 3] += 1
        delta = engine.update_weights(new, encoding="delta")
        assert delta.wire_bytes < receipt.wire_bytes / 10
        check(engine.classify(PROMPTS), new, 2)
        assert not engine.check_weights(new).differing
        assert engine.check_weights(old).differing.count("score.weight") == 1
        if size > 1:
            return
        engine.save_sharded_state(str(tmp_path / "saved"))
        with Rollout(str(tmp_path / "saved"), **settings, load_format="sharded_state") as saved:
            check(saved.classify(PROMPTS), new, 0)


def test_a_task_that_the_model_has_no_head_for_is_refused_at_the_start(tmp_path, checkpoint):
    write_tiny(tmp_path, labels=2)
    for path, task, why in (
        (tmp_path, "generate", "needs a language model, and Qwen3ForSequenceClassification has a"),
        (tmp_path, "reward", "one label, and Qwen3ForSequenceClassification has 2: .*num_labels=1"),
        (checkpoint, "classify", "needs a score head, and Qwen3ForCausalLM has none"),
        (checkpoint, "embed", "task must be one of auto, generate, classify, reward"),
    ):
        with pytest.raises(ConfigError, match=why):
            Rollout(str(path), **ENGINE, task=task)
    with Rollout(str(tmp_path), **ENGINE, task="classify", deterministic=True) as engine:
        alone = [engine.classify([ids])[0] for ids in PROMPTS[:5]]
        engine.reset_prefix_cache()
        together = engine.classify(PROMPTS[:5])
        assert engine.server_info().task == "classify"
    for one, same in zip(alone, together, strict=True):
        assert np.array_equal(one.logits, same.logits)  # to the bit


def test_a_config_that_names_no_labels_rightly_is_refused(tmp_path):
    write_tiny(tmp_path, labels=3)
    for overrides, why in (
        ({"problem_type": "guess"}, "problem_type 'guess' is not one of"),
        ({"id2label": None, "num_labels": 0}, "num_labels must be a positive integer"),
        ({"id2label": ["a"]}, "id2label must name the labels"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "over native decoders alone"),
    ):
        with pytest.raises(ConfigError, match=why):
            Rollout(str(tmp_path), **ENGINE, hf_overrides=overrides)


def test_a_reward_model_is_a_component_of_the_policys_updates(tmp_path, checkpoint):
    reward = write_tiny(tmp_path / "reward", labels=1)
    policy = write_tiny(tmp_path / "policy", seed=1)
    with Rollout(checkpoint, **ENGINE, components={"reward": str(tmp_path / "reward")}) as engine:
        with torch.no_grad():
            reward.score.weight.add_(1)
        receipt = engine.update_weights({"policy": policy, "reward": reward})
        assert set(receipt.components) == {"policy", "reward"}
        assert engine.check_weights({"policy": policy, "reward": reward}).equal
