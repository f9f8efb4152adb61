// Data of the server for a view: loading, loaded, or refused; asked again when what it depends on changes.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import { isAbort, wordsOf } from "../api/client";

export interface Resource<T> {
  data: T | undefined;
  error: string | undefined;
  loading: boolean;
  reload: () => void;
}

/** Load with `load`, again whenever a value of `keys` changes; what is under way is given up then. */
export function useResource<T>(load: (signal: AbortSignal) => Promise<T>, keys: readonly unknown[]): Resource<T> {
  const [state, setState] = useState<Omit<Resource<T>, "reload">>({ data: undefined, error: undefined, loading: true });
  const [turn, setTurn] = useState(0);
  const latest = useRef(load);
  latest.current = load;
  useEffect(() => {
    const abort = new AbortController();
    setState((before) => ({ ...before, loading: true }));
    latest.current(abort.signal).then(
      (data) => !abort.signal.aborted && setState({ data, error: undefined, loading: false }),
      (error) => isAbort(error) || abort.signal.aborted || setState({ data: undefined, error: wordsOf(error), loading: false }),
    );
    return () => abort.abort();
  }, [...keys, turn]);
  return { ...state, reload: useCallback(() => setTurn((before) => before + 1), []) };
}
