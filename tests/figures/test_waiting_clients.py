"""The clients of a server are bars over time, and the letters of a text have the colour of their step."""

import drawn

from pagewise.figures import tokens_by_step, waiting_clients


def test_a_bar_from_asking_to_the_first_token_and_one_to_the_end(shown):
    waiting_clients({"one at a time": [(0, 1, 5), (2, 6, 9)]})
    (ax,) = shown[0].axes
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [(0, 1), (1, 4), (2, 4), (6, 3)]
    assert drawn.titles(shown[0]) == ["one at a time: longest wait 4 steps, all is done after 9"]


def test_letters_of_one_step_have_one_colour(shown):
    tokens_by_step({"drafts": ["a", "nd t", "he"]}, width=4)
    (ax,) = shown[0].axes
    colours = [patch.get_facecolor() for patch in ax.patches]
    assert [colour == colours[0] for colour in colours] == [True, False, False, False, False, True, True]
    assert drawn.texts(ax) == ["a", "n", "d", "", "t", "h", "e"]
    assert drawn.titles(shown[0]) == ["drafts: 7 letters in 3 steps"]
