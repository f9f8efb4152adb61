// Goes through steps by itself; people who want no motion get one step for each press.

import { useEffect, useState } from "preact/hooks";

const STEP_MS = 450;

export interface Playing {
  isPlaying: boolean;
  toggle: () => void;
  stopAt: (step: number) => void;
}

export function usePlaying(step: number, length: number, setStep: (step: number) => void): Playing {
  const [isPlaying, setPlaying] = useState(false);
  const atEnd = step >= length - 1;
  useEffect(() => {
    if (!isPlaying) return;
    if (atEnd) {
      setPlaying(false);
      return;
    }
    const timer = setTimeout(() => setStep(step + 1), STEP_MS);
    return () => clearTimeout(timer);
  }, [isPlaying, step, atEnd]);
  const toggle = () => {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
      setStep(atEnd ? 0 : step + 1);
      return;
    }
    if (!isPlaying && atEnd) setStep(0);
    setPlaying(!isPlaying);
  };
  const stopAt = (wanted: number) => {
    setPlaying(false);
    setStep(wanted);
  };
  return { isPlaying, toggle, stopAt };
}
