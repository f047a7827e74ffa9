// What the page of runs/page.py keeps in the browser, for all its tabs.

let known = new Set(); // conversations that this tab has read or written, each as text

function readConversations(key) {
  return JSON.parse(localStorage.getItem(key) ?? "[]");
}

function loadConversations(key) {
  const list = readConversations(key);
  known = new Set(list.map((one) => JSON.stringify(one)));
  return [list];
}

// Gradio itself would lose what another tab has saved since this one read the list.
function saveConversations(key, list) {
  localStorage.removeItem("copy");
  const mine = new Set(list.map((one) => JSON.stringify(one)));
  const stored = new Set(readConversations(key).map((one) => JSON.stringify(one)));
  const kept = [...mine].filter((one) => stored.has(one) || !known.has(one));
  const others = [...stored].filter((one) => !mine.has(one) && !known.has(one));
  localStorage.setItem(key, `[${[...kept, ...others]}]`);
  known = mine;
}
