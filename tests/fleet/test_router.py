"""Prompts go where their beginning has been, unless too much waits there."""

from rollout.fleet.calls.beginning import CHUNK_TOKENS, Beginning
from rollout.fleet.calls.router import Router, load_of
from rollout.weight_sync.protocol.membership import Standing

IDLE = {"a": 0.0, "b": 0.0, "c": 0.0}


def choose(router, prompt, loads, session=None, **settings):
    return router.place(Beginning.of(prompt, session), loads, **settings)


def turns(conversation: int, count: int) -> list[int]:
    return [conversation * 1000 + n for n in range(count * CHUNK_TOKENS)]


def test_a_conversation_stays_where_it_began():
    router = Router()
    for conversation in range(20):
        first = choose(router, turns(conversation, 2), IDLE)
        for length in range(3, 8):
            assert choose(router, turns(conversation, length), IDLE) == first


def test_fronts_that_do_not_talk_agree_on_what_is_new():
    ours, theirs = Router(), Router()
    for n in range(50):
        assert choose(ours, turns(n, 3), IDLE) == choose(theirs, turns(n, 3), IDLE)
    assert {choose(ours, turns(n, 3), IDLE) for n in range(50)} == set(IDLE)


def test_a_busy_member_is_passed_over():
    router = Router()
    home = choose(router, turns(1, 4), IDLE)
    busy = {**IDLE, home: 10.0}
    other = choose(router, turns(1, 4), busy)
    assert other != home
    assert choose(router, turns(1, 4), IDLE) == other  # its beginning is there now


def test_a_beginning_that_costs_more_than_the_wait_is_stayed_with():
    router = Router()
    home = choose(router, turns(1, 40), IDLE)
    busier = {**IDLE, home: 10.0}  # 1280 tokens known, 10 calls more
    assert choose(router, turns(1, 41), busier, new_tokens=200) == home
    assert choose(router, turns(1, 42), busier, new_tokens=300) != home


def test_new_prompts_are_level():
    """As those of conversations that all begin at once, and then stay where they are."""
    router, loads = Router(), dict(IDLE)
    for n in range(48):
        loads[choose(router, turns(n, 8), loads, new_tokens=32)] += 1
    assert max(loads.values()) <= 18


def test_many_equal_prompts_are_spread():
    router, loads = Router(), dict(IDLE)
    for _ in range(30):
        loads[choose(router, turns(1, 1), loads)] += 1
    assert min(loads.values()) >= 8


def test_texts_conversations_and_empty_prompts_have_places():
    router = Router()
    chat = [{"role": "user", "content": "hello " * 100}]
    assert choose(router, chat, IDLE) == choose(router, [*chat, {"role": "assistant"}], IDLE)
    text = "word " * 200
    assert choose(router, text, IDLE) == choose(router, text + "more", IDLE)
    assert choose(router, [], IDLE) in IDLE


def test_what_a_dead_member_knew_is_forgotten():
    router = Router()
    home = choose(router, turns(1, 4), IDLE)
    router.forget(home)
    assert router._known == {}


def test_a_session_stays_whatever_its_prompts_are_and_fronts_agree_where():
    ours, theirs = Router(), Router()
    homes = {}
    for n in range(60):
        name = f"session {n % 20}"
        home = choose(ours, turns(n, 3), IDLE, session=name)
        assert homes.setdefault(name, home) == home
        assert choose(theirs, turns(n + 500, 3), IDLE, session=name) == home
    assert set(homes.values()) == set(IDLE)


def test_few_sessions_move_when_a_member_comes():
    before = {n: choose(Router(), turns(n, 1), IDLE, session=f"s{n}") for n in range(200)}
    four = {**IDLE, "d": 0.0}
    after = {n: choose(Router(), turns(n, 1), four, session=f"s{n}") for n in range(200)}
    moved = [n for n in before if after[n] != before[n]]
    assert 20 < len(moved) < 80
    assert {after[n] for n in moved} == {"d"}


def test_a_session_whose_member_is_busy_goes_to_the_same_one_of_the_others_and_stays_there():
    ours, theirs = Router(), Router()
    home = choose(ours, turns(1, 3), IDLE, session="s")
    busy = {**IDLE, home: 20.0}
    other = choose(ours, turns(2, 3), busy, session="s")
    assert other != home
    assert choose(theirs, turns(3, 3), busy, session="s") == other
    assert choose(ours, turns(2, 4), IDLE, session="s") == other  # what it has is there now
    assert choose(theirs, turns(9, 3), {home: 0.0, other: 0.0}, session="new") in (home, other)


def test_a_member_whose_kv_cache_is_full_counts_for_more():
    def standing(kv_usage: float) -> Standing:
        return Standing(epoch=1, clock=0.0, version=0, state="running", kv_usage=kv_usage)

    assert load_of(4, standing(0.0)) == load_of(4, standing(0.8)) == 4
    assert load_of(4, standing(0.9)) == 6
    assert load_of(4, standing(1.0)) == 8
    router = Router()
    home = choose(router, turns(1, 2), IDLE)
    loads = {name: load_of(4, standing(float(name == home))) for name in IDLE}
    assert choose(router, turns(1, 2), loads) != home
