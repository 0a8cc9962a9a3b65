from __future__ import annotations

from services.trajectory.keys import hash_of, is_hash_of, key_of


def test_a_key_is_made_again_of_its_secret_run_and_attempt_and_of_nothing_else() -> None:
    key = key_of(b"secret", "g000000-r0", 0)
    assert key.startswith("g000000-r0.")
    assert key == key_of(b"secret", "g000000-r0", 0)
    others = {key_of(b"other", "g000000-r0", 0), key_of(b"secret", "g000000-r1", 0), key_of(b"secret", "g000000-r0", 1)}
    assert len({key, *others}) == 4


def test_a_key_is_known_by_its_hash_in_which_it_does_not_stand() -> None:
    key = key_of(b"secret", "g000000-r0", 0)
    kept = hash_of(key)
    assert key.encode() not in kept
    assert is_hash_of(kept, key)
    assert not is_hash_of(kept, key[:-1] + "x")
