import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// `npm run dev` serves the page itself and passes the rest on to uvicorn.
export default defineConfig({ plugins: [react()], server: { proxy: { "/api": "http://localhost:8000" } } });
