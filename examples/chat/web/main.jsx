import { useChat } from "@ai-sdk/react";
import { DefaultChatTransport } from "ai";
import { useEffect, useState } from "react";
import { createRoot } from "react-dom/client";
import "./main.css";

// The address names the chat, so that a reload and a second tab are the same chat.
if (!location.hash) history.replaceState(null, "", `#${crypto.randomUUID()}`);
const id = location.hash.slice(1);
addEventListener("hashchange", () => location.reload());
const transport = new DefaultChatTransport({ api: "/api/chat" });

function Chat() {
  const { messages, sendMessage, regenerate, resumeStream, status, error } = useChat({
    id,
    transport,
    messages: JSON.parse(localStorage.getItem(id) ?? "[]"),
    resume: true,
  });
  const [text, setText] = useState("");
  const busy = status === "submitted" || status === "streaming";
  const offline = error instanceof TypeError; // fetch and streams say so when the network breaks

  useEffect(() => {
    if (messages.length) localStorage.setItem(id, JSON.stringify(messages));
  }, [messages]);

  useEffect(() => {
    const timer = offline && setTimeout(() => resumeStream(), 1000);
    return () => clearTimeout(timer);
  }, [error]);

  const send = (event) => {
    event.preventDefault();
    if (busy || !text.trim()) return;
    sendMessage({ text });
    setText("");
  };
  // The SDK's own stop() would only stop listening; this ends the job, and the stream with it.
  const stop = () => fetch(`/api/chat/${id}/stop`, { method: "POST" });

  return (
    <main data-status={status}>
      <h1>A chat that outlasts the page</h1>
      <p>Reload, open a second tab, kill the worker, lose the network: the answer goes on.</p>
      <ol aria-live="polite">
        {messages.map((message) => (
          <li key={message.id} className={message.role}>
            {shown(message)}
          </li>
        ))}
      </ol>
      {offline && <p role="status">The connection is lost. Trying again …</p>}
      {error && !offline && (
        <p role="alert">
          {error.message} <button onClick={() => regenerate()}>Try again</button>
        </p>
      )}
      <form onSubmit={send}>
        <input
          value={text}
          onChange={(event) => setText(event.target.value)}
          placeholder="Say something"
          aria-label="Message"
          autoFocus
        />
        {busy ? (
          <button type="button" onClick={stop}>
            Stop
          </button>
        ) : (
          <button>Send</button>
        )}
      </form>
    </main>
  );
}

/** An answer that started over has the parts of both attempts: what follows the last restart is the answer. */
function shown({ parts }) {
  const from = parts.findLastIndex((part) => part.type === "data-outlast-restarted") + 1;
  return parts
    .slice(from)
    .filter((part) => part.type === "text")
    .map((part) => part.text)
    .join("");
}

createRoot(document.getElementById("root")).render(<Chat />);
