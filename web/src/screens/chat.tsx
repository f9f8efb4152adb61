import { Empty } from "../components/base";

export function ChatScreen() {
  return <Empty title="Not built yet" />;
}
