// Where the user types the server's key, once it has refused a request without.
import { useState } from "preact/hooks";

import { apiKey, keyWanted } from "../api/client";
import { Button } from "./base";

export function KeyBar() {
  const [typed, setTyped] = useState("");
  if (!keyWanted.value) return null;
  const use = (event: Event) => {
    event.preventDefault();
    apiKey.value = typed.trim();
    keyWanted.value = false;
    // Every view asks again, now with the key.
    location.reload();
  };
  return (
    <form class="key-bar" onSubmit={use}>
      <label for="key">This server needs a key{apiKey.value ? "; the one given is not valid" : ""}</label>
      <input
        id="key"
        type="password"
        autocomplete="off"
        value={typed}
        onInput={(event) => setTyped(event.currentTarget.value)}
      />
      <Button kind="primary" type="submit" disabled={!typed.trim()}>
        Use it
      </Button>
    </form>
  );
}
