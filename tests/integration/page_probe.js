// What a browser is asked about the page: every visible text with its contrast, and what the focus looks like.
window.dipsProbe = {
  parse(text) {
    const m = text.match(/rgba?\(([^)]+)\)/);
    if (!m) return null;
    const [r, g, b, a = 1] = m[1].split(/[,/ ]+/).filter(Boolean).map(Number);
    return { r, g, b, a };
  },
  luminance({ r, g, b }) {
    const [x, y, z] = [r, g, b].map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  },
  ground(node) {
    for (let at = node; at && at.nodeType === 1; at = at.parentElement) {
      const colour = this.parse(getComputedStyle(at).backgroundColor);
      if (colour && colour.a > 0.99) return colour;
    }
    return this.parse(getComputedStyle(document.documentElement).backgroundColor);
  },
  under(text) {  // the last bar that is drawn below the middle of a text of a plot
    const box = text.getBBox(), x = box.x + box.width / 2, y = box.y + box.height / 2;
    let found = null;
    for (const rect of text.ownerSVGElement.querySelectorAll(":scope > rect")) {
      if (text.compareDocumentPosition(rect) & Node.DOCUMENT_POSITION_FOLLOWING) break;
      const r = rect.getBBox(), fill = this.parse(getComputedStyle(rect).fill);
      if (fill && x > r.x && x < r.x + r.width && y > r.y && y < r.y + r.height) found = fill;
    }
    return found;
  },
  contrasts() {
    const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
      const node = walk.currentNode, at = node.parentElement, text = node.textContent.trim();
      if (!text || at.closest("script, style, title, .sr, .skip, [hidden]") || !at.getClientRects().length) continue;
      const svg = at instanceof SVGTextElement, style = getComputedStyle(at);
      const ink = this.parse(svg ? style.fill : style.color), ground = (svg && this.under(at)) || this.ground(svg ? at.ownerSVGElement.parentElement : at);
      const [a, b] = [this.luminance(ink), this.luminance(ground)].sort((p, q) => q - p);
      found.push({ text: text.slice(0, 40), ratio: (a + 0.05) / (b + 0.05) });
    }
    return found;
  },
  focused() {
    const at = document.activeElement, style = getComputedStyle(at), box = at.getBoundingClientRect();
    return { key: at.id || at.getAttribute("aria-labelledby") || at.getAttribute("aria-label") || (at.tagName === "SUMMARY" ? at.textContent : at.className || at.tagName),
      outline: style.outlineStyle !== "none" ? parseFloat(style.outlineWidth) : 0, seen: box.bottom > 0 && box.top < innerHeight };
  },
};
