// Numbers as people read them.

export function seconds(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value <= 0) return value ? `−${seconds(-value)}` : "0 s";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function bytes(value: number | null | undefined): string {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let left = value;
  let unit = 0;
  while (left >= 1000 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${unit === 0 || left >= 99.5 ? Math.round(left) : left.toFixed(1)} ${units[unit]}`;
}

export function count(value: number | null | undefined): string {
  return value == null ? "–" : Math.round(value).toLocaleString("en-GB");
}

export function percent(part: number, whole: number): string {
  if (!whole) return "0 %";
  const share = (100 * part) / whole;
  return `${share > 0 && share < 1 ? share.toFixed(1) : Math.round(share)} %`;
}

export function plural(number: number, one: string, many = `${one}s`): string {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** Return a time (seconds since 1970) in the browser's zone: of today the time, else the date too. */
export function moment(since1970: number | null | undefined): string {
  if (since1970 == null) return "–";
  const date = new Date(since1970 * 1000);
  const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}
