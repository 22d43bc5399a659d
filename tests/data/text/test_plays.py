"""Shakespeare's plays: who says what, and sequences of characters of which no test character was trained on."""

from pathlib import Path

import numpy as np
import pytest

from conftest import error_message
from fedtailor.data.leaf.shakespeare import CHARACTERS
from fedtailor.data.sample_table import SampleTable
from fedtailor.data.text.plays import join_roles, read_plays, split_roles
from fedtailor.data.text.sequences import cut_sequences

PLAY = """THE TRAGEDY OF NOBODY

by William Shakespeare

PERSONS REPRESENTED.

KING, of nowhere
ANN, his daughter

ACT I.

SCENE I. A heath.

[Thunder. Enter KING
and ANN.]

KING.
Who's there?  {Aside.]
Speak!

[He draws.]

I am the king.

ANN. [Kneels.]
Good my lord.

SCENE II. Another place.

These lines are nobody's.

KING
Who?

ANN.
I!

[Exeunt
"""


def text_of(length: int, role: str = "play: ANN") -> SampleTable:
    """One role whose characters count up, so that a number says where a character is."""
    y = np.arange(length) % 80
    return SampleTable((y + 1).astype(np.uint8), y.astype(np.uint8), 80, np.zeros(length, np.int64), (role,))


def test_roles_say_their_lines_without_stage_directions() -> None:
    assert split_roles(PLAY) == {"KING": "Who's there? Speak! I am the king. Who?", "ANN": "Good my lord. I!"}


def test_roles_with_abbreviated_names_are_found_but_ordinary_lines_are_not() -> None:
    opening = "ACT I\n\nHam.\nTo be,\n\nHor.\nMy lord?\n\n1 Clown.\nDig.\n\nMy good lord.\nO!\n\n"
    play = f"{opening}Ham.\nI.\n\nHam. and Hor.\nNo."
    speeches = {"Ham": "To be, I.", "Hor": "My lord?", "1 Clown": "Dig. My good lord. O!", "Ham. and Hor": "No."}
    assert split_roles(play) == speeches


def test_characters_have_leafs_numbers_and_roles_of_different_plays_differ() -> None:
    table = join_roles({"hamlet_gut.txt": PLAY.encode(), "king_lear_gut.txt": PLAY.encode()}, "The folder")
    assert table.owner_names == ("hamlet: KING", "hamlet: ANN", "king lear: KING", "king lear: ANN")
    assert table.owner is not None and isinstance(table.x, np.ndarray) and table.classes == 80
    ann = table.y[table.owner == 3]
    assert "".join(CHARACTERS[number] for number in ann) == "Good my lord. I!"
    assert (table.x == table.y + 1).all(), "token 0 is padding"


def test_class_is_the_next_character_and_a_sequence_starts_every_step() -> None:
    table = cut_sequences(text_of(1000), step=50)
    assert isinstance(table.x, np.ndarray) and table.is_test is not None and table.x.dtype == np.int32
    assert (table.x[:, -1] % 80 == table.y).all() and table.x.shape == (18, 80)
    train = table.x[~table.is_test]
    assert train[:, 0].tolist() == [1 + 50 * k % 80 for k in range(15)], "the last one starts at 700: its class is 780"
    assert table.x[table.is_test][:, 0].tolist() == [1 + (800 + 50 * k) % 80 for k in range(3)]


@pytest.mark.parametrize("length", [405, 406, 480, 1234])
@pytest.mark.parametrize("step", [1, 20, 81])
def test_no_character_is_in_training_and_test_sequences(length: int, step: int) -> None:
    position = np.arange(length, dtype=np.int64)
    table = cut_sequences(SampleTable(position, position, None, np.zeros(length, np.int64), ("a: B",)), step)
    assert isinstance(table.x, np.ndarray) and table.is_test is not None
    used = np.concatenate([table.x, table.y[:, None]], axis=1)
    train, test = used[~table.is_test], used[table.is_test]
    assert len(train) and len(test) and train.max() < test.min() and test.min() == length - length // 5


def test_short_roles_are_left_out() -> None:
    y = np.zeros(1000 + 404, np.uint8)
    both = SampleTable(y + np.uint8(1), y, 80, np.repeat([0, 1], [404, 1000]), ("a: SHORT", "a: LONG"))
    table = cut_sequences(both, step=20)
    assert table.owner_names == ("a: LONG",) and table.owner is not None and set(table.owner.tolist()) == {0}
    assert "No role has 405 characters" in error_message(lambda: cut_sequences(text_of(404), step=1))
    assert "No role has 1,001 characters" in error_message(lambda: cut_sequences(both, step=1, min_characters=1001))


def test_folder_is_the_package_or_its_texts_and_no_folio(tmp_path: Path) -> None:
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    (texts / "hamlet_gut.txt").write_text(PLAY)
    (texts / "hamlet_gut_f.txt").write_text(PLAY)
    (texts / "sonnets_gut.txt").write_text(
        "THE SONNETS\nby William Shakespeare\n\nI\n\nFrom fairest creatures\nwe desire increase,\n"
    )
    assert read_plays(tmp_path).owner_names == read_plays(texts).owner_names == ("hamlet: KING", "hamlet: ANN")
    (texts / "lear_gut.txt").symlink_to(__file__)
    assert "is a link that leads out of" in error_message(lambda: read_plays(tmp_path))
