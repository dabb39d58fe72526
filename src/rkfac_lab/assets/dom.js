"use strict";
/* Elements and number formats. Whatever a run says enters the page as a text node or as the value of a harmless
   attribute: nothing on this page parses markup. */

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

function button(label, attributes, onClick) {
  const made = element("button", { type: "button", ...attributes }, label);
  made.addEventListener("click", onClick);
  return made;
}

/* Buttons of which exactly one is pressed. Options are [value, label] pairs. */
function segments(name, options, current, choose) {
  const buttons = options.map(([value, label]) =>
    button(label, { "aria-pressed": String(value === current), "data-value": value }, () => choose(value)));
  return element("div", {}, element("span", { class: "name" }, name),
    element("div", { class: "segments", role: "group", "aria-label": name }, ...buttons));
}

function dropdown(name, id, options, current, choose) {
  const select = element("select", { id }, ...options.map(([value, label]) =>
    element("option", { value, selected: value === current }, label)));
  select.addEventListener("change", () => choose(Number(select.value)));
  return element("div", {}, element("label", { class: "name", for: id }, name), select);
}

/* Redraws a control group without losing the keyboard's place in it. */
function replaceKeepingFocus(host, ...children) {
  const buttons = () => [...host.querySelectorAll("button, select")];
  const place = buttons().indexOf(document.activeElement);
  host.replaceChildren(...children);
  if (place >= 0 && buttons()[place]) buttons()[place].focus();
}

const ABSENT = "–";

function formatNumber(value, digits = 4) {
  if (value === null || value === undefined) return ABSENT;
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(Math.min(digits - 1, 3)).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

function formatPercent(value, decimals = 2) {
  return value === null || value === undefined ? ABSENT : `${(100 * value).toFixed(decimals)} %`;
}

function formatSeconds(value) {
  return value === null || value === undefined ? ABSENT : `${formatNumber(value, 3 + (value >= 1000))} s`;
}

function formatBytes(value) {
  if (value === null || value === undefined) return ABSENT;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) { value /= 1000; power += 1; }
  return `${formatNumber(value, 3)} ${units[power]}`;
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function finite(value) {
  return typeof value === "number" && Number.isFinite(value);
}
