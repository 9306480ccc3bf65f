// What stands in for the Markdown view where its libraries are not installed: the text, as it is.

import { toast } from "../page.js";

toast("The Markdown libraries are not installed on the server, so answers are shown as plain text. “make setup” installs them.", { error: true });

export class MarkdownView {
  constructor(root) {
    this.root = root;
    root.classList.add("plain");
  }

  update(source) {
    this.root.textContent = source;
  }
}
