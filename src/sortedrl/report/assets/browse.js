// Lists to browse. Everything from the data becomes a text node, never markup.

function element(name, css, ...children) {
  const made = document.createElement(name);
  if (css) made.className = css;
  made.append(...children);
  return made;
}

// Characters that show as nothing or turn the text around are replaced by their code points, as
// `visible` of html.py does; inside an emoji they change its look and stay.
const PICTOGRAPH = "[\\u00a9\\u00ae\\u203c\\u2049\\u2122\\u2139\\u2190-\\u27ff\\u2900-\\u2bff\\u3030\\u303d\\u3297\\u3299\\u{1f000}-\\u{1faff}][\\u{1f3fb}-\\u{1f3ff}]?\\ufe0f?";
const HIDDEN = "[\\u0000-\\u0008\\u000b\\u000c\\u000e-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f"
  + "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u2800\\u3164\\ufeff\\uffa0\\ufe00-\\ufe0f\\u{e0000}-\\u{e0fff}"
  + "\\ufff0-\\ufffb\\u{13430}-\\u{1343f}\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\ud800-\\udfff\\p{Noncharacter_Code_Point}]|\\r(?!\\n)";
const EMOJI = PICTOGRAPH + "(?:\\u200d" + PICTOGRAPH + ")*|[0-9#*]\\ufe0f\\u20e3";
const HIDDEN_OR_EMOJI = new RegExp("(" + EMOJI + ")|" + HIDDEN, "gu");

function visible(text) {
  return text.replace(HIDDEN_OR_EMOJI, (sign, emoji) => emoji || "‹U+" + sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "›");
}

// A long text comes without its middle: its beginning, the number of characters left out, its end.
function whole(text) {
  return typeof text === "string" ? text : text[0] + "\n" + text[2];
}

function block(text) {
  const made = element("pre", "text");
  made.tabIndex = 0;
  if (typeof text === "string") {
    made.append(visible(text));
  } else {
    const words = text[1].toLocaleString("en") + " characters left out";
    made.append(visible(text[0]), element("span", "left-out", words), visible(text[2]));
  }
  return made;
}

function gist(text) {
  const made = element("span", "gist", visible(Array.from(text.slice(0, 280)).slice(0, 140).join("").replace(/[\t\n\r ]+/g, " ")));
  made.dir = "auto";
  return made;
}

function decimal(value) {
  return value === null ? "none" : String(Number(value.toFixed(4)));
}

function facts(entries) {
  const list = element("dl");
  for (const [name, words] of entries) {
    list.append(element("dt", "", visible(name)), element("dd", "", words));
  }
  return list;
}

function counted(count, thing) {
  return count.toLocaleString("en") + " " + thing + (count === 1 ? "" : "s");
}

function includesWords(texts, words) {
  return texts.some((text) => whole(text).toLowerCase().includes(words));
}

// What opens below its head; the inside is made when it is first seen.
function drawer(head, fill, isOpen = false) {
  const made = element("details", "", head);
  if (isOpen) {
    made.open = true;
    made.append(fill());
  } else {
    made.addEventListener("toggle", () => made.append(fill()), { once: true });
  }
  return made;
}

// A list that grows by a page at a time; gives a function that shows other items.
// `kept.shown` says how many are shown: at first as many as it says, then a page.
function listing(box, button, item, size, kept = {}) {
  let items = [];
  function grow(count) {
    const from = box.childElementCount;
    const until = Math.min(from + count, items.length);
    box.append(...items.slice(from, until).map(item));
    kept.shown = until;
    button.hidden = until === items.length;
    button.textContent = "show " + Math.min(size, items.length - until) + " more of " + items.length.toLocaleString("en");
  }
  button.addEventListener("click", () => grow(size));
  return (chosen) => {
    const count = Math.max(size, items.length ? 0 : kept.shown || 0);
    items = chosen;
    box.replaceChildren();
    grow(count);
  };
}

function watchForm(form, show) {
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}
