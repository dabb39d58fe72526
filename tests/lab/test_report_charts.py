"""The page's charts in a real browser: what is drawn, and what clicking, keys and dragging change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from .chromium import Show, comparison
from .handmade import make_run


def test_one_curve_an_optimizer_with_its_band_axes_and_targets(show: Show) -> None:
    page = show(comparison())
    assert list(page.curves()) == ["k-fac", "sgd", "adamw"]
    assert page.bands() == 3
    assert page.texts("#curves .x-title") == ["Training seconds"]  # what an optimizer costs comes first
    assert page.texts("#curves .y-title")[0].startswith("Test accuracy")
    assert page.rules() == ["95 %", "80 %"]
    assert page.texts("#legend button") == ["k-fac", "sgd", "adamw"]
    assert page.one("#title").text == "digits-mlp"
    assert page.one("#compared").text == "k-fac, sgd, adamw compared over 2 seeds: 6 runs (6 finished)."
    assert page.texts(".card .value") == ["adamw", "k-fac", "adamw"]
    assert page.texts("#warnings li") == []


def test_what_is_written_down_as_svg_is_painted_on_the_canvas(show: Show) -> None:
    page = show(comparison())
    before = [page.painted(slot) for slot in range(3)]
    assert min(before) > 50
    assert page.painted(3) == 0  # nobody has the fourth colour
    page.click("#legend button:nth-child(2)")
    after = [page.painted(slot) for slot in range(3)]
    assert after[2] == 0  # sgd's: colours go by name
    assert min(after[:2]) > 50


def test_toggles_change_what_is_drawn(show: Show) -> None:
    page = show(comparison())
    drawn = [page.curves()]
    toggles = (("Against", "cpu_seconds"), ("Against", "step"), ("Against", "epoch"), ("Shown", "test_loss"))
    for name, value in (*toggles, ("Scale", "linear")):
        page.press(name, value)
        drawn.append(page.curves())
        assert page.one(f"[aria-label='{name}'] [data-value='{value}']").get_attribute("aria-pressed") == "true"
    assert all(earlier != later for earlier, later in pairwise(drawn[1:]))
    assert page.texts("#curves .x-title") == ["Epoch"]
    assert page.texts("#curves .y-title") == ["Test loss"]
    assert page.rules() == []  # the targets are of another metric
    page.press("Against", "cpu_seconds")
    page.press("Time scale", "log")
    assert page.texts("#curves .x-title") == ["CPU seconds of training (log scale)"]
    page.press("Seeds", "each")
    assert len(page.curves()) == 6
    assert page.bands() == 0


def test_against_seconds_curves_are_placed_by_their_time(show: Show) -> None:
    page = show(comparison())
    over = page.one("#curves .u-over")
    width = over.size["width"]
    left = float(page.browser.execute_script("return arguments[0].offsetLeft", over))
    for axis, longest in (("seconds", 6.0), ("cpu_seconds", 9.0)):  # the axis goes from 0 to the slowest's last
        page.press("Against", axis)
        drawn = page.curves()
        for name, share in (("k-fac", 1.0), ("sgd", 0.5), ("adamw", 0.25)):
            assert drawn[name][-1][0] == pytest.approx(left + width * share, abs=0.6), (name, longest)


def test_the_scale_spaces_values_as_it_says(show: Show) -> None:
    page = show(comparison())

    def steps(values: Sequence[float]) -> list[float]:
        return [later - earlier for earlier, later in pairwise(values)]

    def heights() -> list[float]:
        return [y for _, y in page.curves()["sgd"]]

    assert {"50 %", "80 %", "90 %", "95 %"} <= set(page.ticks())
    page.press("Scale", "linear")
    on_linear = steps([float(tick.split()[0]) for tick in page.ticks()])
    assert on_linear == pytest.approx([on_linear[0]] * len(on_linear))
    page.press("Shown", "train_loss")  # which halves from epoch to epoch
    first, second = steps(heights())
    assert first == pytest.approx(2 * second, rel=0.01)
    page.press("Scale", "log")
    first, second = steps(heights())
    assert first == pytest.approx(second, rel=0.01)


def test_equal_curves_are_said_and_seen(show: Show) -> None:
    twins = [make_run(name, seed, epoch_seconds=(2, 2)) for name in ("rs-kfac", "rs-kfac+sgd") for seed in (1, 2)]
    other = make_run("sgd", accuracies=(0.5, 0.8))
    page = show([*twins, other])
    said = "rs-kfac and rs-kfac+sgd have exactly the same test accuracy at every evaluation."
    assert page.one("#equal").text == said
    page.press("Against", "step")
    assert page.one("#equal").text == f"{said} Where one lies on the other, the lower one is drawn wider."
    drawn = {part.get("data-name"): part for part in page.svg() if part.get("class") == "curve"}
    lower, upper = drawn["rs-kfac"], drawn["rs-kfac+sgd"]
    assert lower.get("points") == upper.get("points")
    assert float(str(lower.get("stroke-width"))) >= 2 * float(str(upper.get("stroke-width")))
    assert lower.get("stroke-dasharray") != upper.get("stroke-dasharray")
    assert min(page.painted(0), page.painted(1)) > 50
    page.click("#legend button:nth-child(1)")
    assert page.one("#equal").text == ""


def test_the_legend_hides_and_shows(show: Show) -> None:
    page = show(comparison())
    page.click("#legend button:nth-child(2)")
    assert list(page.curves()) == ["k-fac", "adamw"]
    assert page.one("#legend button:nth-child(2)").get_attribute("aria-pressed") == "false"
    page.click("#legend button:nth-child(1)")
    page.click("#legend button:nth-child(3)")
    assert page.curves() == {}
    assert "choose an optimizer" in page.one("#curves").text
    page.click("#legend button:nth-child(2)")
    assert list(page.curves()) == ["sgd"]


def test_keys_work_as_well_as_the_mouse(show: Show) -> None:
    page = show(comparison())
    second = page.one("[aria-label='Against'] [data-value='step']")
    page.browser.execute_script("arguments[0].focus()", second)
    ActionChains(page.browser).send_keys(Keys.SPACE).perform()
    assert page.texts("#curves .x-title") == ["Step"]
    focused = page.browser.switch_to.active_element
    assert focused.get_attribute("data-value") == "step"  # redrawing does not lose the place
    page.press("Against", "epoch")
    page.browser.execute_script("document.querySelector('#curves .plot').focus()")
    ActionChains(page.browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    assert page.texts("#curves .tip .at") == ["Epoch 2"]
    assert page.shown_values() == {"k-fac": "90.00 %", "sgd": "61.50 %", "adamw": "85.00 %"}
    ActionChains(page.browser).send_keys(Keys.ESCAPE).perform()
    assert page.shown_values() == {}


def test_pointing_reads_the_exact_values(show: Show) -> None:
    page = show(comparison())
    page.press("Against", "epoch")
    picture = page.one("#curves .u-over")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    right = picture.size["width"] // 2 - 10
    ActionChains(page.browser).move_to_element_with_offset(picture, right, 0).perform()
    assert page.texts("#curves .tip .at") == ["Epoch 3"]
    assert page.shown_values() == {"k-fac": "97.50 %", "sgd": "85.00 %", "adamw": "96.50 %"}
    assert "97.00 % to 98.00 % · 6 s · step 18 · epoch 3" in page.texts("#curves .tip small")
    ActionChains(page.browser).move_to_element(page.one("#title")).perform()
    assert page.shown_values() == {}


def test_among_many_runs_those_nearest_to_the_pointer_are_read(show: Show) -> None:
    page = show([make_run("sgd", seed, accuracies=(seed / 20, seed / 20)) for seed in range(1, 16)])
    page.press("Seeds", "each")
    picture = page.one("#curves .u-over")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    ActionChains(page.browser).move_to_element_with_offset(picture, 0, -picture.size["height"] // 2 + 5).perform()
    assert list(page.shown_values()) == [f"sgd, seed {seed}" for seed in range(6, 16)]
    assert page.texts("#curves .tip .at")[-1] == "and 5 more"


def test_dragging_zooms_and_the_button_goes_back(show: Show) -> None:
    page = show(comparison())
    before, whole = page.ticks(), page.curves()
    assert not page.one("#reset-zoom").is_displayed()
    picture = page.one("#curves .u-over")
    page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    drag = ActionChains(page.browser).move_to_element_with_offset(picture, 100, -150).click_and_hold()
    drag.move_by_offset(250, 60).release().perform()
    assert page.ticks() != before
    # What was 250 pixels is the whole width now.
    width = picture.size["width"]
    here = [x for x, _ in page.curves()["k-fac"]]
    then = [x for x, _ in whole["k-fac"]]
    assert (here[2] - here[1]) / (then[2] - then[1]) == pytest.approx(width / 250, rel=0.02)
    page.click("#reset-zoom")
    assert page.ticks() == before
    assert page.curves() == whole
