// Small parts that every screen uses. All text goes through Preact, which escapes it.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";

type ButtonProps = Omit<JSX.IntrinsicElements["button"], "icon"> & {
  kind?: "plain" | "primary" | "danger" | "quiet";
  /** What it does, where the content is a sign only. */
  label?: string;
  /** Whether what it does is under way: it keeps the focus then, and does nothing. */
  busy?: boolean;
};

export function Button({ kind = "plain", label, busy = false, children, class: extra, onClick, ...rest }: ButtonProps) {
  const state = busy ? ({ "aria-disabled": true } as const) : { onClick };
  return (
    <button type="button" class={`button ${kind} ${extra ?? ""}`} aria-label={label} title={label} {...state} {...rest}>
      {children}
    </button>
  );
}

export function Badge({ tone = "plain", children }: { tone?: Tone; children: ComponentChildren }) {
  return <span class={`badge ${tone}`}>{children}</span>;
}

export type Tone = "plain" | "good" | "warn" | "bad" | "info";

/** A block with a heading; `actions` stand at its right. */
export function Panel(props: { title: string; actions?: ComponentChildren; children: ComponentChildren; class?: string }) {
  return (
    <section class={`panel ${props.class ?? ""}`}>
      <header>
        <h2>{props.title}</h2>
        {props.actions && <div class="actions">{props.actions}</div>}
      </header>
      {props.children}
    </section>
  );
}

/** A labelled control. */
export function Field({ label, hint, children }: { label: string; hint?: ComponentChildren; children: ComponentChildren }) {
  return (
    <label class="field">
      <span class="label">{label}</span>
      {children}
      {hint && <span class="hint">{hint}</span>}
    </label>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="title">{title}</p>
      {children && <div>{children}</div>}
    </div>
  );
}

export function Notice({ tone = "info", children }: { tone?: Tone; children: ComponentChildren }) {
  return (
    <div class={`notice ${tone}`} role={tone === "bad" ? "alert" : undefined}>
      {children}
    </div>
  );
}

export function Busy({ children = "Loading" }: { children?: ComponentChildren }) {
  return (
    <p class="busy" role="status">
      {children}
    </p>
  );
}

/** How far something is, 0 to 1; undefined while that is unknown. */
export function Progress({ share, label }: { share?: number; label: string }) {
  return <progress aria-label={label} max={1} value={share} />;
}

/** A number with its name. */
export function Stat({ name, value, hint }: { name: string; value: ComponentChildren; hint?: string }) {
  return (
    <div class="stat" title={hint}>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

/** A modal dialog: Esc and its button close it, and the focus goes back to where it was. */
export function Dialog(props: { title: string; onClose: () => void; children: ComponentChildren; class?: string }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current?.showModal();
    return () => before instanceof HTMLElement && before.focus();
  }, []);
  return (
    <dialog ref={dialog} class={props.class} aria-label={props.title} onClose={props.onClose}>
      <header>
        <h2>{props.title}</h2>
        <Button kind="quiet" label="Close" onClick={() => dialog.current?.close()}>
          ✕
        </Button>
      </header>
      {props.children}
    </dialog>
  );
}
