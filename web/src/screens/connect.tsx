import { Empty } from "../components/base";

export function ConnectScreen() {
  return <Empty title="Not built yet" />;
}
