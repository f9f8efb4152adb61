// Shows a prompt's tokens in their paints; however long it is, only what can be seen is split into tokens.

import type { Painting } from "./paint";
import type { PromptModel, Segment } from "./prompt-model";

interface Shown {
  segment: Segment;
  body: HTMLElement;
  /** One element per token; empty until it has been near the screen. */
  spans: HTMLElement[];
  near: boolean;
  /** The painting that its elements show. */
  painted: Painting | null;
}

/** How far beyond the visible part tokens are made and painted. */
const MARGIN_PX = 600;
const LINE_CHARS = 70;
const LINE_PX = 22;

export class PromptMap {
  private readonly shown: Shown[] = [];
  private readonly byBody = new Map<Element, Shown>();
  private readonly observer: IntersectionObserver;
  private marked: HTMLElement | null = null;

  constructor(
    private readonly root: HTMLElement,
    private readonly model: PromptModel,
    private painting: Painting,
    label: (segment: Segment) => string,
  ) {
    const near = { root, rootMargin: `${MARGIN_PX}px 0px` };
    this.observer = new IntersectionObserver((entries) => this.moved(entries), near);
    root.dataset["mode"] = painting.mode;
    root.replaceChildren(...model.segments.map((segment) => this.placed(segment, label)));
    for (const one of this.shown) this.observer.observe(one.body);
  }

  close(): void {
    this.observer.disconnect();
  }

  /** Changes the paints of what is near the screen now, and of the rest when it gets there. */
  repaint(painting: Painting): void {
    this.painting = painting;
    this.root.dataset["mode"] = painting.mode;
    for (const one of this.shown) if (one.near) this.paint(one);
  }

  /** The token that an element of the map stands for, or null. */
  tokenAt(element: EventTarget | null): number | null {
    if (!(element instanceof HTMLElement)) return null;
    const one = element.parentElement && this.byBody.get(element.parentElement);
    const number = one ? one.spans.indexOf(element) : -1;
    return one && number >= 0 ? one.segment.first + number : null;
  }

  /** Frames one token, and scrolls to it. */
  mark(token: number): void {
    const one = this.shown.find(({ segment }) => token >= segment.first && token < segment.end);
    if (!one) return;
    this.split(one);
    this.marked?.removeAttribute("data-marked");
    this.marked = one.spans[token - one.segment.first]!;
    this.marked.dataset["marked"] = "";
    this.marked.scrollIntoView({ block: "nearest" });
  }

  /** Scrolls to the beginning of a chunk, frames its first token and returns that; null without such a chunk. */
  showChunk(chunk: number): number | null {
    const one = this.shown.find(({ segment }) => segment.chunk === chunk);
    const section = one?.body.parentElement;
    if (!one || !section) return null;
    this.mark(one.segment.first);
    this.root.scrollTo({ top: section.offsetTop - this.root.offsetTop });
    return one.segment.first;
  }

  private placed(segment: Segment, label: (segment: Segment) => string): HTMLElement {
    const section = document.createElement("div");
    section.className = segment.chunk < 0 ? "prompt-segment" : "prompt-segment in-chunk";
    if (segment.begins) {
      const head = document.createElement("div");
      head.className = "prompt-label";
      head.textContent = label(segment);
      section.append(head);
    }
    const body = document.createElement("div");
    body.className = "prompt-body";
    // Until it comes near the screen it is text, so that it has its height and can be searched.
    body.textContent = this.model.text(segment.first, segment.end);
    section.append(body);
    // About its height, for as long as it was not on the screen yet.
    section.style.containIntrinsicSize = `auto ${Math.ceil(body.textContent.length / LINE_CHARS) * LINE_PX}px`;
    const one: Shown = { segment, body, spans: [], near: false, painted: null };
    this.shown.push(one);
    this.byBody.set(body, one);
    return section;
  }

  private moved(entries: IntersectionObserverEntry[]): void {
    for (const entry of entries) {
      const one = this.byBody.get(entry.target);
      if (!one) continue;
      one.near = entry.isIntersecting;
      if (one.near) this.paint(one);
    }
  }

  private split(one: Shown): void {
    if (one.spans.length) return;
    const { first, end } = one.segment;
    for (let token = first; token < end; token++) {
      const span = document.createElement("span");
      span.textContent = this.model.text(token, token + 1);
      one.spans.push(span);
    }
    one.body.replaceChildren(...one.spans);
  }

  private paint(one: Shown): void {
    this.split(one);
    if (one.painted === this.painting) return;
    const { paint } = this.painting;
    const before = one.painted?.paint;
    const { first } = one.segment;
    one.spans.forEach((span, number) => {
      const value = paint[first + number]!;
      if (!before || before[first + number] !== value) span.className = `p${value}`;
    });
    one.painted = this.painting;
  }
}
