// Text of a model as markdown. HTML in it stays text; what marked makes is cleaned again by DOMPurify.
import DOMPurify from "dompurify";
import { Marked } from "marked";
import { useLayoutEffect, useRef } from "preact/hooks";

const ALLOWED = "p br strong em del code pre ul ol li blockquote h3 h4 h5 h6 hr table thead tbody tr th td a".split(" ");

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // Nothing is loaded for an answer; the picture's words and address are shown.
    image: ({ href, text }) => escaped(`![${text}](${href})`),
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});

/** Return clean HTML of markdown. */
export function htmlOf(text: string): string {
  const made = marked.parse(text, { async: false });
  return DOMPurify.sanitize(made, { ALLOWED_TAGS: ALLOWED, ALLOWED_ATTR: ["href", "start", "align"], ALLOW_DATA_ATTR: false });
}

interface Props {
  text: string;
  /** How many sources `[n]` may name. */
  sources?: number;
  onCite?: (source: number) => void;
  /** Words that no source holds; they are underlined. */
  unsupported?: readonly string[];
}

export function Markdown({ text, sources = 0, onCite, unsupported }: Props) {
  const root = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    if (!root.current) return;
    root.current.innerHTML = htmlOf(text);
    for (const link of root.current.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noreferrer noopener";
    }
    markCitations(root.current, sources);
    if (unsupported?.length) markUnsupported(root.current, unsupported);
  }, [text, sources, unsupported]);
  const onClick = (event: MouseEvent) => {
    const button = event.target instanceof Element ? event.target.closest("button.cite") : null;
    if (button) onCite?.(Number(button.textContent?.replace(/\D/g, "")) - 1);
  };
  return <div class="markdown" ref={root} onClick={onClick} />;
}

function markCitations(root: HTMLElement, sources: number): void {
  eachMatch(root, /\[(\d{1,2})\]/g, (found) => {
    const number = Number(found[1]);
    if (number < 1 || number > sources) return null;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "cite";
    button.textContent = found[0];
    button.setAttribute("aria-label", `Source ${number}`);
    return button;
  });
}

function markUnsupported(root: HTMLElement, words: readonly string[]): void {
  const patterns = words.filter(Boolean).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  if (!patterns.length) return;
  const whole = new RegExp(`(?<![\\p{L}\\p{N}])(?:${patterns.join("|")})(?![\\p{L}\\p{N}])`, "gu");
  eachMatch(root, whole, (found) => {
    const mark = document.createElement("span");
    mark.className = "unsupported";
    mark.title = "No retrieved chunk holds this";
    mark.textContent = found[0];
    return mark;
  });
}

/** Put elements in the place of what matches in the text below `root`, code and links left out. */
function eachMatch(root: HTMLElement, pattern: RegExp, made: (found: RegExpMatchArray) => HTMLElement | null): void {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const texts: Text[] = [];
  while (walker.nextNode()) texts.push(walker.currentNode as Text);
  for (const node of texts) {
    if (node.parentElement?.closest("a, pre, button, .unsupported")) continue;
    const matches = [...node.data.matchAll(pattern)].reverse();
    for (const found of matches) {
      const element = made(found);
      if (!element) continue;
      const rest = node.splitText(found.index ?? 0);
      rest.data = rest.data.slice(found[0].length);
      rest.before(element);
    }
  }
}

function escaped(text: string): string {
  return text.replace(/[&<>"']/g, (one) => `&#${one.charCodeAt(0)};`);
}
