"""Steppers: the same bytes each time, nothing from elsewhere, a still picture without scripts, keys and buttons."""

import re

import pytest
from browser import BROWSER, probe
from stepped import untrusted

from pagewise.figures.steps import stepper

PAGE = "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'><body>"


def draw(figure, number):
    figure.subplots().bar(range(number + 1), range(number + 1))


def bars(**options):
    frames = [(f"{n} bars & more", n) for n in range(4)]
    return stepper(frames, draw, title="How <many> bars?", alt="Bars, each higher than the last.", **options)


@pytest.mark.slow
def test_same_frames_give_the_same_bytes():
    assert bars()._repr_html_() == bars()._repr_html_()
    assert repr(bars()) == "How <many> bars? 4 steps. Bars, each higher than the last."


@pytest.mark.slow
def test_nothing_comes_from_elsewhere():
    markup = bars()._repr_html_()
    assert not re.search(r"https?:|@import|url\(|<link", markup)
    assert [src[:22] for src in re.findall(r' src="([^"]*)"', markup)] == ["data:image/png;base64,"] * 4


def test_each_picture_says_what_it_shows_and_which_step_it_is(unrendered):
    alts = re.findall(r' alt="([^"]*)"', bars()._repr_html_())
    assert alts[0] == "Bars, each higher than the last. Step 4 of 4: 3 bars &amp; more"
    assert alts[3] == "Bars, each higher than the last. Step 3 of 4: 2 bars &amp; more"


@pytest.mark.parametrize(("options", "still"), [({}, 3), ({"still": 1}, 1)])
def test_without_scripts_one_picture_a_caption_and_a_sentence_stay(options, still, unrendered):
    left = untrusted(bars(**options)._repr_html_())
    assert re.findall(r"<(img|button|input|output|div|p)\b", left) == ["div", "p", "div", "img", "p", "p"]
    assert re.findall(r'<img src="data:[^>]* alt="[^"]*Step (\d)', left) == [f"{still + 1}"]
    assert f"<p>{still} bars &amp; more</p>" in left
    assert f"<em>This is picture {still + 1} of 4. You can step through all of them in the book" in left


def test_no_frames_are_refused():
    with pytest.raises(ValueError, match=r"frames must hold at least one"):
        stepper([], draw, title="Nothing?", alt="Nothing.")


if BROWSER:
    STEP = """
        const all = [...document.querySelectorAll(".pw-stepper")], root = all[0];
        const [back, next] = root.querySelectorAll("button"), slider = root.querySelector("input");
        const said = () => {
            const shown = [...root.querySelectorAll("img")].map((img, i) => [i, img]).filter(([, img]) => !img.hidden);
            return [shown.map(([i]) => i), root.querySelector("output").textContent,
                    root.querySelector(".pw-caption").textContent];
        };
        const press = (key, where) => where.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
        const seen = [said()];
        next.click(); seen.push(said());
        press("ArrowRight", next); seen.push(said());
        press("ArrowRight", slider); seen.push(said());
        press("ArrowRight", slider); seen.push(said());
        back.click(); seen.push(said());
        press("Home", root); seen.push(said());
        slider.value = 2; slider.dispatchEvent(new Event("input")); seen.push(said());
        press("End", slider); seen.push(said());
        const other = [...all[1].querySelectorAll("img")].findIndex(img => !img.hidden);
        const wide = [...root.querySelectorAll("*")].filter(e => e.getBoundingClientRect().right > innerWidth).length;
        const focus = (e) => { e.disabled = false; e.focus(); return document.activeElement === e; };
        const reached = [back, next, slider].map(focus);
        return {seen, other, reached, wide, width: innerWidth, page: document.scrollingElement.scrollWidth};
    """

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [1400, 420])
    def test_steps_by_button_key_and_slider_without_network(tmp_path, width):
        page = tmp_path / "page.html"
        page.write_text(PAGE + bars()._repr_html_() + bars()._repr_html_())
        found, errors = probe(page, STEP, width=width)
        steps = [0, 1, 2, 3, 3, 2, 0, 2, 3]
        assert found["seen"] == [[[i], f"{i + 1} of 4", f"{i} bars & more"] for i in steps]
        assert found["other"] == 0  # the second stepper of the page has not moved
        assert found["reached"] == [True] * 3
        assert found["wide"] == 0
        assert found["page"] <= found["width"]
        assert errors == []
